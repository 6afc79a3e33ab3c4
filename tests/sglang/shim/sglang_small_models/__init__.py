"""The architectures that the tests run; named to SGLang so that it does not import its 250 others."""
