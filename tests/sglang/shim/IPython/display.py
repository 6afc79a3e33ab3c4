"""Shows nothing."""


class HTML:
    """Text for a notebook."""

    def __init__(self, *_args, **_kwargs):
        pass


def display(*_args, **_kwargs):
    """Show nothing."""
