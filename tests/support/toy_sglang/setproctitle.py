"""Names nothing."""


def setproctitle(title: str) -> None:
    """Do nothing."""
