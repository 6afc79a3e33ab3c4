"""Which of the hosts that are there a run uses: `--include`, `--exclude`, `--num-nodes`, an allocation. Pure.

The grammar is DeepSpeed's, `host1@host2:0,2`: hosts between `@`, behind a colon some of their GPUs. Besides,
names and GPUs may have ranges, `node[1-4]:0-3`, and an IPv6 address stands in brackets.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from launcher.fields import nearest
from launcher.hostfile import HostLineError, Place
from launcher.hostlist import fold
from launcher.hosts import HostEntry
from launcher.hostwords import WordError, read_gpus, read_host
from launcher.options import Picked, Selection
from relax_actor.errors import ConfigError


class SelectionError(ConfigError):
    """A selection that names what is not there, or leaves nothing."""


def parse_picked(text: str, option: str) -> tuple[Picked, ...]:
    """Read what `--include` or `--exclude` names.

    Args:
        text: such as `host1@host2:0,2`.
        option: what errors call it.

    Raises:
        HostLineError: it does not follow the grammar.
    """
    picked: dict[str, Picked] = {}
    offset = 0
    for item in text.split("@"):
        place = Place(source=option, line=0, text=text, offset=offset)
        for each in _picked(item, place):
            if each.host in picked:
                raise HostLineError(place, f"names {each.host} twice", "join its GPUs with commas")
            picked[each.host] = each
        offset += len(item) + 1
    return tuple(picked.values())


def select(hosts: Iterable[HostEntry], selection: Selection) -> tuple[HostEntry, ...]:
    """Return the hosts that a run uses, with the GPUs it uses of them, in their order.

    Args:
        hosts: all there are.
        selection: which of them.

    Raises:
        SelectionError: it names a host or a GPU that is not there, or leaves too little.
    """
    left = tuple(hosts)
    if selection.include:
        left = tuple(_included(left, selection.include))
    if selection.exclude:
        left = tuple(_excluded(left, selection.exclude))
    if len(left) < selection.num_nodes:
        fact = f"is {selection.num_nodes}, but there are {len(left)} hosts"
        raise SelectionError("--num-nodes", fact, _known(left))
    left = left[: selection.num_nodes or None]
    return tuple(_limited(host, selection.gpus_per_node) for host in left)


def within(allocated: Sequence[HostEntry], named: Sequence[HostEntry]) -> tuple[HostEntry, ...]:
    """Return the named hosts as the allocation has them: in an allocation, a hostfile is a filter.

    Args:
        allocated: what the scheduler gave, with GPUs where it says which.
        named: what the user named; a short name means the host of that full name.

    Raises:
        SelectionError: a host, a GPU or a number of slots that was not allocated.
    """
    return tuple(_granted(_allocated(host, allocated), host) for host in named)


def _picked(item: str, place: Place) -> Iterator[Picked]:
    name, colon, gpus = item.rpartition(":") if not item.endswith("]") else (item, "", "")
    if not colon:
        name, gpus = item, ""
    at = 0
    try:
        word = read_host(name)
        at = len(name) + 1
        chosen = read_gpus(gpus) if colon else ()
    except WordError as error:
        raise HostLineError(place.at(place.offset + at + error.offset), error.fact, error.hint) from None
    yield from (Picked(host=host, gpus=chosen) for host in word.names)


def _included(hosts: Sequence[HostEntry], picked: Sequence[Picked]) -> Iterator[HostEntry]:
    wanted = {_find(hosts, each.host, "--include").name: each.gpus for each in picked}
    for host in hosts:
        if host.name in wanted:
            gpus = wanted[host.name]
            yield _with_gpus(host, _checked(host, gpus, "--include")) if gpus else host


def _excluded(hosts: Sequence[HostEntry], picked: Sequence[Picked]) -> Iterator[HostEntry]:
    unwanted = {_find(hosts, each.host, "--exclude").name: each.gpus for each in picked}
    if all(host.name in unwanted and not unwanted[host.name] for host in hosts):
        raise SelectionError("--exclude", "leaves no host", _known(hosts))
    for host in hosts:
        if host.name not in unwanted:
            yield host
        elif gpus := _checked(host, unwanted[host.name], "--exclude"):
            yield _without_gpus(host, gpus)


def _without_gpus(host: HostEntry, gpus: tuple[str, ...]) -> HostEntry:
    if host.visible is None:
        fact = f"takes GPUs from {host.name}, of which it is not known how many it has"
        raise SelectionError("--exclude", fact, "write slots= in its line, or --gpus-per-node")
    left = tuple(gpu for gpu in host.visible if gpu not in gpus)
    if not left:
        raise SelectionError(
            "--exclude", f"leaves no GPU of {host.name}", f"leave out all of it: {host.name}"
        )
    return _with_gpus(host, left)


def _limited(host: HostEntry, gpus_per_node: int) -> HostEntry:
    if not gpus_per_node:
        return host
    if host.visible is None:
        return msgspec.structs.replace(host, slots=gpus_per_node)
    if len(host.visible) < gpus_per_node:
        fact = f"is {gpus_per_node}, but {host.name} has {len(host.visible)}"
        raise SelectionError("--gpus-per-node", fact, "auto takes what each host has")
    return _with_gpus(host, host.visible[:gpus_per_node])


def _with_gpus(host: HostEntry, gpus: tuple[str, ...]) -> HostEntry:
    return msgspec.structs.replace(host, gpus=gpus, slots=None)


def _checked(host: HostEntry, gpus: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Return GPUs that the host has, or may have."""
    for gpu in gpus:
        if host.visible is not None and gpu not in host.visible:
            fact = f"names GPU {gpu} of {host.name}, which has {_gpus(host.visible)}"
            raise SelectionError(option, fact)
    return gpus


def _find(hosts: Sequence[HostEntry], name: str, option: str) -> HostEntry:
    for host in hosts:
        if host.name.lower() == name.lower():
            return host
    close = nearest(name, [host.name for host in hosts])
    hint = f"did you mean {close}?" if close else _known(hosts)
    raise SelectionError(option, f"names {name}, which is not among the hosts", hint)


def _allocated(named: HostEntry, allocated: Sequence[HostEntry]) -> HostEntry:
    for host in allocated:
        if named.name == host.name or _short(named.name) == _short(host.name):
            return host
    fact = f"names {named.name}, which is not in the allocation"
    raise SelectionError(named.where or named.name, fact, f"it has {fold(host.name for host in allocated)}")


def _granted(granted: HostEntry, named: HostEntry) -> HostEntry:
    """Return a host by its name in the allocation, with what the user said of it."""
    if granted.visible is not None and named.visible is not None:
        beyond = named.slots is not None and named.slots > len(granted.visible)
        foreign = [gpu for gpu in named.gpus or () if gpu not in granted.visible]
        if beyond or foreign:
            asked = f"GPU {foreign[0]}" if foreign else f"{named.slots} slots"
            fact = f"asks for {asked} of {named.name}, but the allocation has {_gpus(granted.visible)}"
            raise SelectionError(named.where or named.name, fact)
    if named.gpus is not None or granted.visible is None:
        return msgspec.structs.replace(named, name=granted.name)
    gpus = granted.visible[: named.slots]
    return msgspec.structs.replace(named, name=granted.name, gpus=gpus, slots=None)


def _short(name: str) -> str:
    """Return a name without its domain; addresses stay whole."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0].lower()


def _gpus(gpus: Sequence[str]) -> str:
    return f"GPUs {', '.join(gpus)}" if gpus else "no GPU"


def _known(hosts: Iterable[HostEntry]) -> str:
    return f"the hosts are {fold(host.name for host in hosts)}"
