"""Links: actors that share their fate, in any number and both ways."""

from collections.abc import Iterator


class Links:
    """Which actors are linked, directly or through others."""

    def __init__(self) -> None:
        self._linked: dict[str, set[str]] = {}

    def add(self, a: str, b: str) -> None:
        """Link two names."""
        self._linked.setdefault(a, set()).add(b)
        self._linked.setdefault(b, set()).add(a)

    def with_fate_of(self, name: str) -> list[str]:
        """Return all who are linked to `name`, directly or not, in order of name."""
        return sorted(set(self._reach(name, set())) - {name})

    def _reach(self, name: str, seen: set[str]) -> Iterator[str]:
        for other in self._linked.get(name, ()):
            if other not in seen:
                seen.add(other)
                yield other
                yield from self._reach(other, seen)
