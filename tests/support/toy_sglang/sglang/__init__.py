"""What `quick_start` needs of SGLang, small: TOY in the environment says what it does when it is imported."""
