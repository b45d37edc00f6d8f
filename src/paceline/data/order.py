"""Which samples make up which global batch: a function of the seed and the epoch, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from paceline.errors import UsageError
from paceline.random_streams import stream_seed

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, order=True)
class Position:
    """The place of the next global batch: `batch` counts from 0 within `epoch`, and epochs count from 0."""

    epoch: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.batch < 0:
            raise UsageError(f"{self} was given: epoch and batch count from 0")


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the order in which one epoch visits samples 0 to `num_samples` - 1, of shape (num_samples,).

    The order is made by sorting raw 64-bit draws, which numpy promises never to change, so a run can be resumed
    under another numpy.

    >>> epoch_order(5, seed=0, epoch=0, shuffle=False)
    array([0, 1, 2, 3, 4])
    >>> first, again = (epoch_order(50, seed=0, epoch=1, shuffle=True) for _ in range(2))
    >>> bool((first == again).all()), sorted(first.tolist()) == list(range(50))
    (True, True)
    """
    if not shuffle:
        return np.arange(num_samples, dtype=np.int64)
    draws = np.random.Generator(np.random.PCG64(stream_seed(seed, "order", epoch))).bit_generator.random_raw(num_samples)
    return np.argsort(draws, kind="stable").astype(np.int64, copy=False)


def count_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of global batches in an epoch.

    >>> count_batches(10, 4, drop_last=False), count_batches(10, 4, drop_last=True)
    (3, 2)
    """
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def global_batches(order: Indices, batch_size: int, *, drop_last: bool) -> list[Indices]:
    """Return the run of indices of each global batch; the last is smaller where `batch_size` does not divide the order.

    >>> [run.tolist() for run in global_batches(np.arange(5), 2, drop_last=False)]
    [[0, 1], [2, 3], [4]]
    """
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size} was given: a global batch has at least 1 row")
    number = count_batches(len(order), batch_size, drop_last=drop_last)
    return [order[batch * batch_size : (batch + 1) * batch_size] for batch in range(number)]
