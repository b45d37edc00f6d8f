"""Joining the outputs of several micro-batches, as evaluation needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.tree import Batch, children, is_array, join_path, rebuild
from paceline.errors import UsageError


def concatenate(parts: Sequence[Batch], rows: Sequence[int] | None = None) -> Batch:
    """Return the outputs `parts`, all of the same structure, joined along dimension 0.

    - Tensors and arrays are joined along dimension 0; 0-dimensional ones become one of shape (parts,).
    - A list with one entry per row is extended. A list whose tensors all have the rows of the part is a container and is
      joined entry by entry, as are dicts, tuples and dataclasses.
    - Of numbers, strings and other objects there is one per part: they become a list. None in every part stays None.
    - A type that cannot be made from its contents becomes a dict.

    Args:
        parts: at least one output.
        rows: rows of each part. Without it they are read off the first tensor that is not in a list; where there is
            none, a list of tensors that agree in dimension 0 is a container, and any other list has one entry per row.

    Raises:
        UsageError: no parts, parts of different structure, or shapes that do not fit together.

    >>> concatenate([{"y": torch.ones(2), "loss": 0.5}, {"y": torch.zeros(1), "loss": 0.25}])
    {'y': tensor([1., 1., 0.]), 'loss': [0.5, 0.25]}
    """
    if not parts:
        raise UsageError("concatenate was given no parts: give at least one output")
    if rows is not None and len(rows) != len(parts):
        raise UsageError(f"concatenate was given {len(rows)} numbers of rows for {len(parts)} parts: give one for each")
    return _join(list(parts), "", [_first_rows(part) for part in parts] if rows is None else list(rows))


def _first_rows(node: Any) -> int | None:
    """Return the rows of the first tensor or array that is not in a list."""
    if is_array(node):
        return int(node.shape[0]) if node.ndim else None
    if isinstance(node, list):
        return None
    for _, child in children(node) or []:
        found = _first_rows(child)
        if found is not None:
            return found
    return None


def _join(nodes: list[Any], path: str, rows: list[int | None]) -> Any:
    first = nodes[0]
    kinds = {"tensor" if isinstance(node, torch.Tensor) else type(node).__name__ for node in nodes}
    inside = [children(node) for node in nodes]
    if len(kinds) > 1 and not (inside[0] is None and all(isinstance(node, int | float | complex) for node in nodes)):
        raise _unlike(path, "are of types " + ", ".join(sorted(kinds)))
    if is_array(first):
        return _join_arrays(nodes, path)
    if inside[0] is None:
        return None if first is None else nodes
    if isinstance(first, list) and _are_lists_of_rows(nodes, path, rows):
        return [entry for node in nodes for entry in node]
    names = [[name for name, _ in found or []] for found in inside]
    for other in names[1:]:
        if other != names[0]:
            raise _unlike(path, f"hold {names[0]} and {other}")
    columns = zip(*([child for _, child in found or []] for found in inside), strict=True)
    joined = [_join(list(column), join_path(path, name), rows) for name, column in zip(names[0], columns, strict=True)]
    return rebuild(first, joined)


def _join_arrays(nodes: list[Any], path: str) -> Any:
    try:
        if isinstance(nodes[0], torch.Tensor):
            return torch.cat([node if node.ndim else node.reshape(1) for node in nodes])
        return np.concatenate([node if node.ndim else node.reshape(1) for node in nodes])
    except (RuntimeError, ValueError) as error:
        raise _unlike(path, f"have shapes {[tuple(node.shape) for node in nodes]}") from error


def _are_lists_of_rows(nodes: list[list[Any]], path: str, rows: list[int | None]) -> bool:
    """Return whether the lists have one entry per row, as against being containers; refuse where both can be meant."""
    by_row = all(known is None or len(node) == known for node, known in zip(nodes, rows, strict=True))
    contain = len({len(node) for node in nodes}) == 1
    for node, known in zip(nodes, rows, strict=True):
        sizes = {int(entry.shape[0]) if is_array(entry) and entry.ndim else None for entry in node}
        contain = contain and len(sizes) == 1 and sizes != {None} and (known is None or sizes == {known})
    if by_row and contain and None not in rows and any(known != 1 for known in rows):
        raise UsageError(
            f"{path or 'the output'} is a list of {[len(node) for node in nodes]} entries for parts of {rows} rows, "
            f"and can be one entry per row or a container: return a tuple or a tensor instead"
        )
    return not contain


def _unlike(path: str, what: str) -> UsageError:
    return UsageError(
        f"the outputs at {path or 'the top'} {what}: outputs of all micro-batches must have the same structure, and "
        f"shapes that differ in dimension 0 only; pad them, or return one entry per row in a list"
    )
