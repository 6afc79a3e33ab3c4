"""Policy versions on GPUs: published from one, staged for others. Nothing here is imported where there is none."""
