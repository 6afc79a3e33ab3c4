"""Many sequences in one row, every distinct prefix only once.

The samples of a prompt share the prompt, and all prompts may share a few-shot prefix. A transformer's
hidden state at a token depends only on the tokens before it, so sequences that begin alike can share
those rows: a trie. Each row attends to its ancestors and itself, at the position that is its depth.
Log-probs and gradients are those of every sequence alone.

Rows are in pre-order, children in order of first appearance. Then the rows below a row are the
interval that starts at it, and "is an ancestor of" is two comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Step = int | tuple[int, bytes]
"""A token, or one with a label: two tokens share a row only where their labels are equal too."""


@dataclass(frozen=True, kw_only=True)
class PackedTree:
    """Some sequences as one tree of token rows."""

    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows], depth in the tree, from 0
    parents: Tensor  # int64 [rows], -1 where a sequence begins
    ends: Tensor  # int64 [rows], one past the last row below this one
    paths: tuple[Tensor, ...]  # int64 [tokens] a sequence: the row of each of its tokens

    @property
    def rows(self) -> int:
        """How many distinct prefixes there are."""
        return self.tokens.numel()

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """Bool [rows, rows]: whether row i may attend to row j, its ancestor or itself."""
        rows = torch.arange(self.rows)
        return (rows[None, :] <= rows[:, None]) & (rows[:, None] < self.ends[None, :])


def pack_tree(sequences: Sequence[Sequence[int]]) -> PackedTree:
    """Pack sequences into one tree.

    Args:
        sequences: token ids; to train on a response, prompt + response without its last token.

    Returns:
        The tree. With a prompt of p tokens, response token k of sequence i is predicted from row
        `paths[i][p - 1 + k]`.
    """
    trie = _Trie()
    for sequence in sequences:
        trie.add(sequence, trie.match(sequence))
    return trie.packed()


def pack_trees(sequences: Sequence[Sequence[Step]], *, max_rows: int) -> list[PackedTree]:
    """Pack sequences into as few trees as a bound on their rows allows, without reordering.

    The mask has rows² entries, and rows of unrelated sequences cost attention for nothing.

    Args:
        sequences: as for `pack_tree`, or with labels; those that share a prefix should be neighbours.
        max_rows: of one tree; only a single sequence may have more.

    Returns:
        Trees of consecutive sequences.
    """
    tries: list[_Trie] = []
    for sequence in sequences:
        known = tries[-1].match(sequence) if tries else []
        if not tries or tries[-1].rows + len(sequence) - len(known) > max_rows:
            tries.append(_Trie())
            known = []
        tries[-1].add(sequence, known)
    return [trie.packed() for trie in tries]


class _Trie:
    """Nodes in order of insertion, so that a parent comes before its children."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Step], int] = {}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._paths: list[list[int]] = []

    @property
    def rows(self) -> int:
        return len(self._tokens)

    def match(self, sequence: Sequence[Step]) -> list[int]:
        """Return the nodes of the longest prefix that is known already."""
        nodes: list[int] = []
        parent = -1
        for step in sequence:
            node = self._children.get((parent, step))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def add(self, sequence: Sequence[Step], known: list[int]) -> None:
        """Add what follows the known prefix."""
        path = list(known)
        for depth in range(len(known), len(sequence)):
            path.append(self._new_node(path[-1] if path else -1, sequence[depth], depth))
        self._paths.append(path)

    def _new_node(self, parent: int, step: Step, depth: int) -> int:
        node = self.rows
        self._children[parent, step] = node
        self._tokens.append(step if isinstance(step, int) else step[0])
        self._parents.append(parent)
        self._depths.append(depth)
        return node

    def packed(self) -> PackedTree:
        """Return the tree with its nodes renumbered to pre-order."""
        sizes = self._subtree_sizes()
        row_of = torch.tensor(self._preorder(sizes), dtype=torch.int64)
        node_of = torch.argsort(row_of)
        parents = torch.tensor(self._parents, dtype=torch.int64)[node_of]
        parent_rows = torch.where(parents < 0, -1, row_of[parents]) if self.rows else parents
        return PackedTree(
            tokens=torch.tensor(self._tokens, dtype=torch.int64)[node_of],
            positions=torch.tensor(self._depths, dtype=torch.int64)[node_of],
            parents=parent_rows,
            ends=torch.arange(self.rows) + torch.tensor(sizes, dtype=torch.int64)[node_of],
            paths=tuple(row_of[torch.tensor(path, dtype=torch.int64)] for path in self._paths),
        )

    def _subtree_sizes(self) -> list[int]:
        sizes = [1] * self.rows
        for node in range(self.rows - 1, -1, -1):
            if self._parents[node] >= 0:
                sizes[self._parents[node]] += sizes[node]
        return sizes

    def _preorder(self, sizes: list[int]) -> list[int]:
        """Return the row of each node: right behind its parent and its earlier siblings' subtrees."""
        rows: list[int] = []
        next_free = [0] * (self.rows + 1)  # the last entry stands for the root above all
        for node, parent in enumerate(self._parents):
            row = next_free[parent]
            next_free[parent] += sizes[node]
            next_free[node] = row + 1
            rows.append(row)
        return rows
