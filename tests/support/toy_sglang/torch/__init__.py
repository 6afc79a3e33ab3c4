"""As much of torch as asks about GPUs."""

from torch import cuda  # noqa: F401 - torch has it
