"""Stands in for torchvision, whose wheel is built for CUDA: text models need its names at import alone."""

__version__ = "0.0.0+stand-in"


def missing_from(module):
    """Make the `__getattr__` of a module whose every function says that it is missing."""

    def getattr_(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args, **_kwargs):
            raise NotImplementedError(f"{module}.{name} has no stand-in")

        return missing

    return getattr_
