"""Policy versions from host to host: a chain of stores, each of which pulls from the one before it."""
