"""Of the hosts that are there, those are used that the user picked, and no others."""

import pytest

from launcher.hostfile import HostLineError, parse
from launcher.hosts import HostEntry
from launcher.options import Picked, Selection
from launcher.selecting import SelectionError, parse_picked, select, within

HOSTS = parse("node1 slots=4\nnode2 slots=4\nnode3 gpus=GPU-a,GPU-b\nnode4\n")


def picked(**selection) -> list[tuple[str, tuple[str, ...] | None]]:
    for option in ("include", "exclude"):
        if option in selection:
            selection[option] = parse_picked(selection[option], f"--{option}")
    return [(host.name, host.visible) for host in select(HOSTS, Selection(**selection))]


ALL = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        ({"include": "node2@node1"}, [("node1", ALL), ("node2", ALL)]),
        ({"include": "node1:0,2@node2"}, [("node1", ("0", "2")), ("node2", ALL)]),
        ({"include": "node[1-2]:1-3"}, [("node1", ("1", "2", "3")), ("node2", ("1", "2", "3"))]),
        ({"include": "node3:GPU-b"}, [("node3", ("GPU-b",))]),
        ({"include": "NODE4:0,1"}, [("node4", ("0", "1"))]),
        ({"exclude": "node1@node3"}, [("node2", ALL), ("node4", None)]),
        (
            {"exclude": "node1:0@node3:GPU-a@node4"},
            [("node1", ("1", "2", "3")), ("node2", ALL), ("node3", ("GPU-b",))],
        ),
        ({"num_nodes": 2}, [("node1", ALL), ("node2", ALL)]),
        ({"include": "node2@node4", "num_nodes": 1}, [("node2", ALL)]),
        ({"num_nodes": 1, "gpus_per_node": 2}, [("node1", ("0", "1"))]),
        ({"include": "node4", "gpus_per_node": 2}, [("node4", ("0", "1"))]),
    ],
)
def test_a_selection_leaves_hosts_and_gpus(selection, left):
    assert picked(**selection) == left


@pytest.mark.parametrize(
    ("selection", "error"),
    [
        (
            {"include": "nod1"},
            "`--include` names nod1, which is not among the hosts\n\nhint: did you mean node1?",
        ),
        (
            {"include": "x"},
            "`--include` names x, which is not among the hosts\n\nhint: the hosts are node[1-4]",
        ),
        ({"include": "node1:4"}, "`--include` names GPU 4 of node1, which has GPUs 0, 1, 2, 3"),
        ({"exclude": "node1:4"}, "`--exclude` names GPU 4 of node1, which has GPUs 0, 1, 2, 3"),
        ({"exclude": "node[1-4]"}, "`--exclude` leaves no host\n\nhint: the hosts are node[1-4]"),
        (
            {"exclude": "node1:0-3"},
            "`--exclude` leaves no GPU of node1\n\nhint: leave out all of it: node1",
        ),
        (
            {"exclude": "node4:0"},
            (
                "`--exclude` takes GPUs from node4, of which it is not known how many it has\n\n"
                "hint: write slots= in its line, or --gpus-per-node"
            ),
        ),
        ({"num_nodes": 5}, "`--num-nodes` is 5, but there are 4 hosts\n\nhint: the hosts are node[1-4]"),
        (
            {"gpus_per_node": 8},
            "`--gpus-per-node` is 8, but node1 has 4\n\nhint: auto takes what each host has",
        ),
    ],
)
def test_what_is_not_there_cannot_be_selected(selection, error):
    with pytest.raises(SelectionError) as caught:
        picked(**selection)

    assert str(caught.value) == error


def test_hosts_of_the_grammar_may_be_addresses():
    assert parse_picked("[fd00::1]:0@[fd00::2]@10.0.0.1:3", "-i") == (
        Picked(host="fd00::1", gpus=("0",)),
        Picked(host="fd00::2"),
        Picked(host="10.0.0.1", gpus=("3",)),
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a@b:x", "`-i` has `x` where a GPU stands\n  a@b:x\n      ^"),
        ("a@@b", "`-i` has ``, which is no name of a host\n  a@@b\n    ^"),
        ("a:0@a:1", "`-i` names a twice\n  a:0@a:1\n      ^\n\nhint: join its GPUs with commas"),
        ("a[2-1]", "`-i` has the range 2-1, which runs backwards\n  a[2-1]\n    ^\n\nhint: write 1-2"),
    ],
)
def test_a_mistake_in_the_grammar_is_shown(text, error):
    with pytest.raises(HostLineError) as caught:
        parse_picked(text, "-i")

    assert str(caught.value).startswith(error)


ALLOCATED = (
    HostEntry(name="n1.cluster", gpus=("0", "1")),
    HostEntry(name="n2.cluster"),
    HostEntry(name="10.0.0.3", gpus=()),
)


def test_in_an_allocation_a_hostfile_is_a_filter_and_its_order_counts():
    named = parse("n2 slots=4 port=22\nn1\n")

    assert [(host.name, host.visible, host.port) for host in within(ALLOCATED, named)] == [
        ("n2.cluster", ("0", "1", "2", "3"), 22),
        ("n1.cluster", ("0", "1"), 0),
    ]


def test_a_filter_takes_a_part_of_the_gpus():
    assert within(ALLOCATED, parse("n1.cluster slots=1"))[0].visible == ("0",)
    assert within(ALLOCATED, parse("n1.cluster gpus=1"))[0].visible == ("1",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "n7",
            (
                "`hostfile:1:1` names n7, which is not in the allocation\n\n"
                "hint: it has n[1-2].cluster,10.0.0.3"
            ),
        ),
        (
            "n1 slots=4",
            "`hostfile:1:1` asks for 4 slots of n1, but the allocation has GPUs 0, 1",
        ),
        ("n1 gpus=3", "`hostfile:1:1` asks for GPU 3 of n1, but the allocation has GPUs 0, 1"),
        ("10.0.0.3:1", "`hostfile:1:1` asks for 1 slots of 10.0.0.3, but the allocation has no GPU"),
        ("10.0.0.4", "`hostfile:1:1` names 10.0.0.4, which is not in the allocation"),
    ],
)
def test_what_was_not_allocated_is_refused_by_name(text, error):
    with pytest.raises(SelectionError) as caught:
        within(ALLOCATED, parse(text))

    assert str(caught.value).startswith(error)
