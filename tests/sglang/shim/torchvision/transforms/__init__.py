"""Transforms of images, of which transformers names the interpolations while it is loaded."""

import enum

from torchvision import missing_from


class InterpolationMode(enum.Enum):
    """The names that transformers maps to PIL's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = missing_from(__name__)
