"""What is in a batch: moving it, pinning it, telling two apart, finding a value, counting the valid entries."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.data.tree import ATOMS, Batch, children, find, is_array, leaves, map_leaves
from paceline.errors import UsageError


def to_device(batch: Batch, device: torch.device | str, non_blocking: bool = False) -> Batch:
    """Return `batch` with every tensor on `device`; other objects that have a method `to` are moved by it.

    >>> to_device({"x": torch.zeros(2), "names": ["a", "b"]}, "meta")["x"].device
    device(type='meta')
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if not isinstance(leaf, (np.ndarray, *ATOMS)) and callable(getattr(leaf, "to", None)):
            return leaf.to(device)
        return leaf

    return map_leaves(move, batch)


def pin(batch: Batch) -> Batch:
    """Return `batch` with every CPU tensor in page-locked memory, or as it is where no accelerator is there to copy to.

    >>> pin({"x": torch.ones(2)})["x"].tolist()
    [1.0, 1.0]
    """
    if not torch.accelerator.is_available():
        return batch

    def lock(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.pin_memory() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        if not isinstance(leaf, (np.ndarray, *ATOMS)) and callable(getattr(leaf, "pin_memory", None)):
            return leaf.pin_memory()
        return leaf

    return map_leaves(lock, batch)


def digest(batch: Batch) -> int:
    """Return a 63-bit hash of the structure, shapes, dtypes and values of `batch`, the same in every process.

    Strides, devices and memory do not count. Objects that are neither containers nor tensors nor plain values count by
    their attributes, or by their type alone where they have none.

    >>> digest({"x": torch.ones(2)}) == digest({"x": torch.ones(2)}) != digest({"x": torch.zeros(2)})
    True
    """
    state = hashlib.sha256()
    _add(batch, state, frozenset())
    return int.from_bytes(state.digest()[:8], "little") >> 1


def _add(node: Any, state: hashlib._Hash, above: frozenset[int]) -> None:
    """Add `node` to the hash; `above` holds the ids of the objects around it, so that a cycle ends."""
    if isinstance(node, torch.Tensor):
        _add_tensor(node, state)
    elif isinstance(node, np.ndarray) and not node.dtype.hasobject:
        state.update(f"array {node.dtype} {node.shape}:".encode())
        if node.nbytes:
            state.update(_checksum(np.ascontiguousarray(node).reshape(-1).view(np.uint8)))
    elif isinstance(node, np.ndarray):
        state.update(f"array {node.shape}:".encode())
        _add(node.reshape(-1).tolist(), state, above)
    elif isinstance(node, ATOMS):
        text = repr(node).encode()
        state.update(f"{type(node).__name__} {len(text)}:".encode() + text)
    elif isinstance(node, set | frozenset):
        state.update(f"set {sorted(digest(item) for item in node)}:".encode())
    else:
        inside = children(node)
        if inside is None:
            inside = sorted((str(name), value) for name, value in getattr(node, "__dict__", {}).items())
        state.update(f"{type(node).__qualname__} {len(inside)}:".encode())
        if id(node) not in above:
            for name, child in inside:
                state.update(f"{len(name)} {name}=".encode())
                _add(child, state, above | {id(node)})


def _add_tensor(tensor: torch.Tensor, state: hashlib._Hash) -> None:
    state.update(f"tensor {tensor.dtype} {tuple(tensor.shape)}:".encode())
    if tensor.device.type == "meta" or not tensor.numel():
        return
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    state.update(_checksum(plain.view(-1).view(torch.uint8).numpy()))


def _checksum(values: np.ndarray[Any, Any]) -> bytes:
    """Return the checksum of many bytes: this guards against mistakes, and crc32 is twice as fast as a hash."""
    return zlib.crc32(values.data).to_bytes(4, "little")


def find_value(batch: Batch, value: int) -> str | None:
    """Return the path of the first leaf of integers on the CPU that holds `value`, or None.

    The path of a batch that is itself a tensor is the empty string.

    >>> find_value({"x": torch.ones(2), "labels": torch.tensor([3, -100])}, -100)
    'labels'
    """
    for path, leaf in leaves(batch):
        if not is_array(leaf):
            continue
        tensor: Any = leaf
        if isinstance(leaf, np.ndarray):
            holds = leaf.dtype.kind in "iu" and np.iinfo(leaf.dtype).min <= value <= np.iinfo(leaf.dtype).max
        else:
            kind = leaf.dtype
            plain = leaf.device.type == "cpu" and leaf.layout == torch.strided
            integers = plain and not kind.is_floating_point and not kind.is_complex and kind != torch.bool
            # Comparing beyond the range would wrap around: 156 as uint8 "equals" -100.
            holds = integers and torch.iinfo(kind).min <= value <= torch.iinfo(kind).max
        if holds and bool((tensor == value).any()):
            return path
    return None


def count_valid(labels: str = "labels", *, ignore_index: int = -100, shift: int = 0) -> Callable[[Batch], int]:
    """Return a function that counts the labels of a batch which are not `ignore_index`, for a job's `count`.

    A loss that leaves out some labels is a mean over the others; micro-batches with unlike numbers of them must be weighted
    by these numbers. The function can be pickled.

    Args:
        labels: dotted path of the labels: a key, the index in a tuple or list, a field, or several joined by dots.
        ignore_index: the label that the loss leaves out.
        shift: how many positions the loss drops from the front of the last dimension. 1 for Hugging Face causal models,
            which predict label `t + 1` at position `t`; 0 for losses that compare position by position.

    Raises:
        UsageError: `shift` is negative; later, where the batch has no tensor or array at `labels`.

    >>> batch = {"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])}
    >>> count_valid()(batch), count_valid(shift=1)(batch)
    (3, 1)
    >>> count_valid("1", ignore_index=0)((None, torch.tensor([0, 1, 2])))
    2
    """
    if shift < 0:
        raise UsageError(f"shift={shift} was given to count_valid: allowed is 0 or more, 1 for Hugging Face causal models")
    return functools.partial(_count, labels=labels, ignore_index=ignore_index, shift=shift)


def _count(batch: Batch, *, labels: str, ignore_index: int, shift: int) -> int:
    try:
        leaf = find(batch, labels)
    except KeyError:
        leaf = None
    if not is_array(leaf):
        found = ", ".join(repr(path) for path, node in leaves(batch) if is_array(node)) or "none"
        raise UsageError(
            f"count_valid looks for labels at {labels!r}, where the batch has no tensor or array: its tensors and "
            f"arrays are {found}; give one of these paths"
        )
    if shift:
        leaf = leaf[..., shift:]
    return int((leaf != ignore_index).sum())
