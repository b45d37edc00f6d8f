"""Cutting a global batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.rows import Rule, Split, split_rule
from paceline.data.tree import Batch, children, map_leaves, rebuild
from paceline.errors import UsageError
from paceline.layout import deal

ALIGNMENT = 64
"""The memory boundary in bytes at which micro-batches begin: kernels round differently at other addresses."""


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that sum to `total` and differ by at most one, the larger first.

    >>> even_sizes(13, 2), even_sizes(3, 4)
    ((7, 6), (1, 1, 1, 0))
    """
    if parts < 1 or total < 0:
        raise UsageError(f"{total} rows cannot be cut into {parts} parts: give at least 0 rows and at least 1 part")
    return tuple(len(part) for part in deal(total, parts))


def count_rows(batch: Batch, split: Split | None = None) -> int:
    """Return the number of rows of `batch`.

    Raises:
        UsageError: the leaves disagree, can be read in two ways, or there is no tensor among them.

    >>> count_rows({"pixels": torch.zeros(4, 3), "names": ["a", "b", "c", "d"], "scale": 0.5})
    4
    """
    return split_rule(batch, split)[0]


def split_batch(batch: Batch, sizes: Sequence[int], split: Split | None = None) -> list[Batch]:
    """Return `batch` cut into consecutive pieces of `sizes` rows, each of the same structure.

    Tensors and arrays of one dimension and more are cut along dimension 0, and a list with one entry per row is cut
    too; 0-dimensional tensors, numbers, strings and None are given whole to every piece. `split` says otherwise by path.
    A list in which every tensor has the rows of the batch is a container, and so is a tuple always. Pieces start at a
    64-byte boundary, are contiguous (channels-last stays so) and share memory with `batch` where that allows it.

    Args:
        batch: tensors, arrays or containers of them.
        sizes: rows of each piece; their sum is the number of rows. A size of 0 gives a piece without rows.
        split: path -> dimension of the rows, or None for a leaf to be given whole. The path of a list or tuple -> 0
            makes it a sequence of rows; a path inside of a list makes it a container.

    Raises:
        UsageError: the rows cannot be told, or `sizes` do not sum to them.

    >>> split_batch({"x": torch.arange(3), "scale": 0.5}, (2, 1))
    [{'x': tensor([0, 1]), 'scale': 0.5}, {'x': tensor([2]), 'scale': 0.5}]
    """
    rows, rule = split_rule(batch, split)
    if sum(sizes) != rows or any(size < 0 for size in sizes):
        raise UsageError(f"sizes {tuple(sizes)} were given for a batch of {rows} rows: give sizes >= 0 that sum to {rows}")
    pieces, start = [], 0
    for size in sizes:
        pieces.append(take_rows(batch, rule, start, start + size))
        start += size
    return pieces


def take_rows(batch: Batch, rule: Rule, start: int, stop: int) -> Batch:
    """Return rows `start` to `stop` of a batch, cut by the rule that `split_rule` gave for it."""
    if rule is None:
        return batch
    if isinstance(rule, list):
        inside = children(batch) or []
        return rebuild(batch, [take_rows(child, part, start, stop) for (_, child), part in zip(inside, rule, strict=True)])
    if isinstance(batch, torch.Tensor):
        # .data has a version counter of its own: a model that changes one micro-batch in place must not spoil the
        # backward of another one.
        return _settled_tensor(batch.data.narrow(rule, start, stop - start))
    if isinstance(batch, np.ndarray):
        return _settled_array(batch[(slice(None),) * (rule % batch.ndim) + (slice(start, stop),)])
    return batch[start:stop]


def aligned(batch: Batch) -> Batch:
    """Return `batch` with every CPU tensor and array at a 64-byte boundary; those that lie there are not copied."""

    def settle(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.device.type == "cpu":
            return leaf if leaf.data_ptr() % ALIGNMENT == 0 else leaf.clone()
        if isinstance(leaf, np.ndarray) and leaf.ctypes.data % ALIGNMENT:
            return _settled_array(leaf)
        return leaf

    return map_leaves(settle, batch)


def _settled_tensor(piece: torch.Tensor) -> torch.Tensor:
    """Return `piece` dense and at a 64-byte boundary, itself where it already is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = piece.ndim in formats and piece.is_contiguous(memory_format=formats[piece.ndim])
    if not channels_last and not piece.is_contiguous():
        return piece.contiguous()
    return piece if piece.data_ptr() % ALIGNMENT == 0 else piece.clone()


def _settled_array(piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `piece` in C order at a 64-byte boundary, itself where it already is; numpy allocates at 16 bytes."""
    if piece.dtype.hasobject or piece.nbytes == 0:
        return piece.copy()
    if piece.flags.c_contiguous and piece.ctypes.data % ALIGNMENT == 0:
        return piece
    memory = np.empty(piece.nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    place: np.ndarray[Any, Any] = memory[offset : offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)
    place[...] = piece
    return place
