"""What all records of the control wire have in common."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all control records."""
