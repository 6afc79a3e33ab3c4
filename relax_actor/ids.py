"""The identities that travel in messages, logs and file names."""

from typing import NewType

import msgspec

GroupId = NewType("GroupId", int)
"""Position of a prompt in the run's prompt stream, from 0; negative for evaluation prompts."""

SampleIndex = NewType("SampleIndex", int)
"""Which completion of its prompt, from 0."""

PolicyVersion = NewType("PolicyVersion", int)
"""Counts published weights; 0 is the starting point. It never goes back within a run."""

LeaseId = NewType("LeaseId", int)

SPARE = "SPARE"
"""What a process is called that waits for a name: no id is in capitals, so nobody else is."""


class Holder(msgspec.Struct, frozen=True, order=True):
    """One incarnation of one actor: who holds a lease, owns a segment or sent a message."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"
