"""The part of a global batch that one process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.batch import even_sizes, take_rows
from paceline.data.order import Position
from paceline.data.rows import Split, split_rule
from paceline.data.tree import Batch
from paceline.errors import UsageError


@dataclass(frozen=True)
class LocalBatch:
    """The micro-batches of one global batch that this process owns.

    `position` is the place of the global batch, `sizes` the rows of each of its micro-batches (on every process the
    same, zeros included), and `micro_batches` the owned ones by their number; those without rows are absent.
    """

    position: Position
    sizes: tuple[int, ...]
    micro_batches: Mapping[int, Any]

    @property
    def rows(self) -> int:
        """Rows of the global batch, over all processes."""
        return sum(self.sizes)


def cut(batch: Batch, micro_batches: int, mine: range, position: Position, split: Split | None = None) -> LocalBatch:
    """Return this process's part of a global batch that is already there as one.

    Args:
        batch: the whole global batch, the same on every process.
        micro_batches: into how many micro-batches it is cut, over all processes.
        mine: the numbers of those that this process owns.
        position: the place of the batch.
        split: path -> dimension of the rows, as for `split_batch`.

    Raises:
        UsageError: the rows cannot be told, there are none, or `mine` reaches beyond the micro-batches.

    >>> import torch
    >>> cut(torch.arange(5), 2, range(1, 2), Position()).micro_batches
    {1: tensor([3, 4])}
    """
    check_share(micro_batches, mine)
    rows, rule = split_rule(batch, split)
    if rows < 1:
        raise UsageError(f"the batch of {position} has no rows: give at least 1")
    sizes = even_sizes(rows, micro_batches)
    owned = {number: take_rows(batch, rule, start, stop) for number, start, stop in bounds(sizes, mine)}
    return LocalBatch(position, sizes, owned)


def bounds(sizes: tuple[int, ...], mine: range) -> list[tuple[int, int, int]]:
    """Return number, first row and last row + 1 of each owned micro-batch that has rows.

    >>> bounds((2, 2, 1, 0), range(1, 4))
    [(1, 2, 4), (2, 4, 5)]
    """
    return [(number, sum(sizes[:number]), sum(sizes[: number + 1])) for number in mine if sizes[number]]


def check_share(micro_batches: int, mine: range) -> None:
    """Refuse a share that is not among the micro-batches."""
    if micro_batches < 1:
        raise UsageError(f"micro_batches={micro_batches} was given: a global batch is cut into at least 1")
    if len(mine) and not (min(mine) >= 0 and max(mine) < micro_batches):
        raise UsageError(
            f"mine={mine} was given: allowed are numbers from 0 to {micro_batches - 1} (micro_batches={micro_batches})"
        )
