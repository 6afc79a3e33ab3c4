"""As much of Triton as asks about GPUs."""
