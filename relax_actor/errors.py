"""What can go wrong in actors and in the loop. Facts are attributes; the text is built from them."""


class RelaxError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(RelaxError):
    """The configuration cannot be run; exit code 2.

    Args:
        where: the option, or file:line, that is wrong.
        fact: what is wrong with it.
        hint: what to do about it, or nothing.
    """

    def __init__(self, where: str, fact: str, hint: str = "") -> None:
        self.where, self.fact, self.hint = where, fact, hint
        super().__init__(f"`{where}` {fact}" + (f"\n\nhint: {hint}" if hint else ""))


class DatasetError(ConfigError):
    """A dataset row cannot be used; names file, line and field."""
