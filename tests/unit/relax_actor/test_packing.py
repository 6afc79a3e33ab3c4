"""The tree that holds every distinct prefix once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_actor.rl.packing import pack_tree, pack_trees

# Few different tokens, so that prefixes are shared often.
some_sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8)


def ancestors(tree, row: int) -> list[int]:
    """Walk up the parents, row first."""
    found = [row]
    while tree.parents[found[-1]] >= 0:
        found.append(tree.parents[found[-1]].item())
    return found


@given(some_sequences)
def test_every_distinct_prefix_has_exactly_one_row(sequences):
    tree = pack_tree(sequences)

    assert tree.rows == len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


@given(some_sequences)
def test_the_path_of_a_sequence_spells_it_from_depth_zero(sequences):
    tree = pack_tree(sequences)

    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == sequence
        assert tree.positions[path].tolist() == list(range(len(sequence)))
        assert ancestors(tree, path[-1].item()) == path.flip(0).tolist()


@given(some_sequences)
def test_a_row_attends_to_its_ancestors_and_itself_only(sequences):
    tree = pack_tree(sequences)

    expected = torch.zeros((tree.rows, tree.rows), dtype=torch.bool)
    for row in range(tree.rows):
        expected[row, ancestors(tree, row)] = True
    assert torch.equal(tree.ancestor_mask, expected)


def test_children_come_in_order_of_first_appearance():
    """Rows: 7, then its child 5 with what is below, then its child 3, although 3 came before 9."""
    tree = pack_tree([[7, 5], [7, 3], [7, 5, 9], [1]])

    assert tree.tokens.tolist() == [7, 5, 9, 3, 1]
    assert tree.parents.tolist() == [-1, 0, 1, 0, -1]
    assert tree.ends.tolist() == [4, 3, 3, 4, 5]


def test_equal_sequences_share_everything():
    tree = pack_tree([[1, 2], [1, 2]])

    assert tree.rows == 2
    assert torch.equal(tree.paths[0], tree.paths[1])


def test_nothing_packs_to_nothing():
    tree = pack_tree([])

    assert (tree.rows, tree.paths) == (0, ())
    assert pack_trees([], max_rows=4) == []


@given(some_sequences, st.integers(1, 12))
def test_a_bound_on_rows_cuts_between_sequences_and_keeps_their_order(sequences, max_rows):
    trees = pack_trees(sequences, max_rows=max_rows)

    spelled = [tree.tokens[path].tolist() for tree in trees for path in tree.paths]
    assert spelled == sequences
    assert all(tree.rows <= max_rows or len(tree.paths) == 1 for tree in trees)


@pytest.mark.parametrize(("max_rows", "trees"), [(3, 1), (2, 2)])
def test_a_tree_is_filled_to_its_bound(max_rows, trees):
    assert len(pack_trees([[1, 2], [1, 3]], max_rows=max_rows)) == trees
