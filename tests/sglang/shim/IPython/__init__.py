"""Stands in for IPython, of which SGLang imports the notebook's display."""  # noqa: N999 - its name
