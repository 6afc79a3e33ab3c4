"""Names of many hosts fold into few words and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.hostlist import HostlistError, expand, expand_all, fold, split


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("node7", ["node7"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[03-06,09]", ["node03", "node04", "node05", "node06", "node09"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[09-100]x", [f"n{number:02}x" for number in range(9, 101)]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("", []),
    ],
)
def test_ranges_are_expanded_and_zeros_kept(pattern, names):
    assert [name for name in expand(pattern) if name] == names


@pytest.mark.parametrize(
    ("pattern", "offset", "fact"),
    [
        ("n[1-3", 1, "has `[` without `]`"),
        ("n1]", 2, "has `]` without `[`"),
        ("n[1]]", 4, "has `]` without `[`"),
        ("n[3-1]", 2, "has the range 3-1, which runs backwards"),
        ("n[1,,2]", 4, "has an empty range"),
        ("n[a-b]", 2, "has `a-b` where a number or a range stands"),
        ("n[0-99999999]", 2, "has 100000000 hosts in one range, more than 65536"),
        ("n[1-300][1-300]", 0, "stands for 90000 hosts, more than 65536"),
    ],
)
def test_a_bad_pattern_says_where_and_why(pattern, offset, fact):
    with pytest.raises(HostlistError) as caught:
        expand(pattern)

    assert (caught.value.offset, caught.value.fact) == (offset, fact)


def test_a_list_of_patterns_is_cut_outside_brackets_only():
    assert split("a[1,2],b,,c") == [(0, "a[1,2]"), (7, "b"), (10, "c")]
    assert expand_all("a[1,2],gpu5") == ["a1", "a2", "gpu5"]


def test_an_error_in_a_list_counts_from_its_start():
    with pytest.raises(HostlistError) as caught:
        expand_all("a,b[2-1]")

    assert caught.value.offset == 4
    assert str(caught.value) == "has the range 2-1, which runs backwards\n\nhint: write 1-2"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["node001", "node002", "node003"], "node[001-003]"),
        ([f"node{number:03}" for number in range(1, 1000)], "node[001-999]"),
        (["a1", "b", "a3", "a2"], "a[1-3],b"),
        (["n09", "n10", "n9"], "n[09-10],n9"),
        (["x", "x1"], "x,x1"),
        (["rollout/0"], "rollout/0"),
        ([], ""),
    ],
)
def test_names_are_folded(names, text):
    assert fold(names) == text


@given(st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,4}(\.x)?", fullmatch=True), unique=True, max_size=30))
def test_what_is_folded_expands_to_the_same_names(names):
    assert sorted(expand_all(fold(names))) == sorted(names)
