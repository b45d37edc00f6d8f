"""The one order in which values of micro-batches are summed, whoever computed them: a binary tree cut at powers of two.

Micro-batch i is leaf i. A node at level k with index j covers micro-batches j * 2**k up to (j + 1) * 2**k; a node whose sibling
has no micro-batch is its own parent. A replica with a run of micro-batches keeps the largest nodes that lie in the run:

    replica 0: micro-batches 0 1 2       nodes 0+1, 2             all:  (0+1) + (2+3), then + (4+5)
    replica 1: micro-batches 3 4 5       nodes 3, 4+5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from paceline.transport.base import Order

T = TypeVar("T")
Node = tuple[int, int]  # (level, index)


class PartialSums(Generic[T]):
    """Sums of a growing run of micro-batches, one for each of the largest nodes of the tree that lie within it."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: list[Node] = []
        self.values: list[T] = []

    def push(self, micro_batch: int, value: T) -> None:
        """Add the next micro-batch's value; they come in ascending order."""
        level, index = 0, micro_batch
        while self.nodes and self.nodes[-1] == (level, index - 1) and index % 2:
            self.nodes.pop()
            value = self._add(self.values.pop(), value)
            level, index = level + 1, index // 2
        self.nodes.append((level, index))
        self.values.append(value)


def nodes_of(micro_batches: Iterable[int]) -> list[Node]:
    """Return the nodes that a run of micro-batches leaves, in order.

    >>> nodes_of([3, 4, 5])
    [(0, 3), (1, 2)]
    """
    sums: PartialSums[None] = PartialSums(lambda a, b: None)
    for micro_batch in micro_batches:
        sums.push(micro_batch, None)
    return sums.nodes


def sum_order(runs: Sequence[Sequence[int]]) -> Order | None:
    """Return the order that sums all ranks' nodes into the root, from each rank's run of micro-batches; None where there are none.

    >>> sum_order([[0, 1, 2], [3, 4, 5]])
    (((0, 0), ((0, 1), (1, 0))), (1, 1))
    """
    parts: dict[Node, Order] = {}
    for rank, run in enumerate(runs):
        parts.update({node: (rank, part) for part, node in enumerate(nodes_of(run))})
    top = max((micro_batch for run in runs for micro_batch in run), default=0).bit_length()

    def expression(level: int, index: int) -> Order | None:
        if (level, index) in parts:
            return parts[level, index]
        if level == 0:
            return None
        left, right = expression(level - 1, 2 * index), expression(level - 1, 2 * index + 1)
        return (left, right) if left is not None and right is not None else (left or right)

    return expression(top, 0)
