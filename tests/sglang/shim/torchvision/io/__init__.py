"""Images in files, which text models do not have."""

import enum

from torchvision import missing_from


class ImageReadMode(enum.Enum):
    """Read as an annotation's default."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


__getattr__ = missing_from(__name__)
