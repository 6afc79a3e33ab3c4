"""Part of the toy."""
