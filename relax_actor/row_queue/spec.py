"""What a queue is told when it starts: its fields, and who wants which of them, and how."""

import msgspec

from relax_actor.errors import ConfigError

MAX_FIELDS = 62
"""A row's fields are the bits of one small integer."""


class Fifo(msgspec.Struct, frozen=True, kw_only=True, tag="fifo"):
    """Rows in the order in which they became ready."""


class WholeGroups(msgspec.Struct, frozen=True, kw_only=True, tag="groups"):
    """Whole groups only, in the order in which their last row became ready."""


class TokenBudget(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Rows for data-parallel ranks: each turn gives every rank about as many tokens, and none too many.

    A turn is dealt once, from all rows that are ready then; every rank gets its own share of it.
    """

    tokens: int
    """The most that one rank gets in a turn; a longer row has a turn's share to itself."""
    ranks: int = 1
    length_of: str = "tokens"
    """The field whose length counts."""


Sampler = Fifo | WholeGroups | TokenBudget


class ConsumerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Consumers that share the work: each row goes to one of them."""

    name: str
    needs: tuple[str, ...]
    """A row is ready for the group when it has all of these."""
    sampler: Sampler = Fifo()
    lease_s: float = 300.0
    """Rows that are not acknowledged by then are dealt again."""
    max_attempts: int = 5
    """A row whose leases ended so often without an acknowledgement is poison, and dropped for this group."""


class QueueSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A queue."""

    fields: tuple[str, ...]
    groups: tuple[ConsumerGroup, ...]
    shared: tuple[str, ...] = ()
    """The fields that the rows of a group (of `keys`) have in common: stored once, and put by group."""
    max_bytes: int = 2 << 30
    """Rows in shared memory; more is moved into files, and where those have no room, producers wait."""
    max_rows: int = 0
    """Rows that may be in the queue at once, after which producers wait; 0 is no limit."""

    def check(self) -> None:
        """Check it before anything starts.

        Raises:
            ConfigError: a field or group twice, a group that needs what nobody puts, a number out of range.
        """
        _check_names("fields", self.fields)
        _check_names("groups", tuple(group.name for group in self.groups))
        if len(self.fields) > MAX_FIELDS:
            raise ConfigError("fields", f"{len(self.fields)} of them; at most {MAX_FIELDS}")
        unknown = [name for name in self.shared if name not in self.fields]
        if unknown:
            raise ConfigError("shared", f"names {unknown[0]!r}; the fields are {', '.join(self.fields)}")
        for group in self.groups:
            _check_group(group, self)

    def mask(self, names: tuple[str, ...]) -> int:
        """Return fields as the bits of an integer."""
        return sum(1 << self.fields.index(name) for name in names)


def _check_names(what: str, names: tuple[str, ...]) -> None:
    if not names:
        raise ConfigError(what, "is empty")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(what, f"names {min(twice)!r} twice")


def _check_group(group: ConsumerGroup, spec: QueueSpec) -> None:
    where = f"groups.{group.name}"
    _check_names(f"{where}.needs", group.needs)
    unknown = [name for name in group.needs if name not in spec.fields]
    if unknown:
        raise ConfigError(f"{where}.needs", f"names {unknown[0]!r}; the fields are {', '.join(spec.fields)}")
    if group.lease_s <= 0 or group.max_attempts < 1:
        raise ConfigError(where, "lease_s must be positive and max_attempts at least 1")
    sampler = group.sampler
    if isinstance(sampler, TokenBudget):
        if sampler.tokens < 1 or sampler.ranks < 1:
            raise ConfigError(f"{where}.sampler", "tokens and ranks must be at least 1")
        if sampler.length_of not in group.needs or sampler.length_of in spec.shared:
            fact = f"counts {sampler.length_of!r}, which is not among needs, or shared"
            raise ConfigError(f"{where}.sampler", fact)
