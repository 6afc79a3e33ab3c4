"""Policy versions on GPUs: published from one, staged for others; imported only where there are some."""
