"""Names alone."""

from torchvision import missing_from
from torchvision.transforms import InterpolationMode  # noqa: F401 - transformers looks for it here too

__getattr__ = missing_from(__name__)
