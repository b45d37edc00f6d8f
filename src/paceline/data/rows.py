"""The rows of a batch: how many there are, and where each leaf has them.

What is cut where is decided once per batch, as a rule that mirrors the batch; `batch.take_rows` follows the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from paceline.data.tree import ATOMS, Batch, children, find, is_array, join_path, leaves
from paceline.errors import UsageError

Split: TypeAlias = Mapping[str, int | None]
"""The dimension that holds the rows of the leaf at a dotted path; None where it has no rows and is given whole."""

Rule: TypeAlias = "int | list[Rule] | None"
"""How one node is cut: along a dimension, child by child, or (None) not at all."""

_ALLOWED = "tensors, numpy arrays, numbers, strings and None in dicts, tuples, named tuples, lists and dataclasses"


def split_rule(batch: Batch, split: Split | None = None) -> tuple[int, Rule]:
    """Return the number of rows of `batch` and the rule by which it is cut; raise UsageError where that cannot be told."""
    given = dict(split or {})
    for path, dimension in given.items():
        _check_entry(batch, path, dimension)
    rows = _find_rows(batch, given)
    return rows, _rule(batch, "", rows, given)


def _check_entry(batch: Batch, path: str, dimension: int | None) -> None:
    """Refuse an entry of `split` that names nothing, or a dimension that is not there."""
    try:
        node = find(batch, path)
    except KeyError:
        names = ", ".join(repr(name) for name, _ in leaves(batch))
        raise UsageError(f"split names {path!r}, which is not in the batch: its leaves are {names}; correct the path") from None
    if dimension is None:
        return
    if is_array(node):
        allowed = range(-node.ndim, node.ndim)
    elif isinstance(node, list | tuple):
        allowed = range(1)
    else:
        raise UsageError(
            f"split gives dimension {dimension} for {path!r}, a {type(node).__name__}: only tensors, arrays, lists "
            f"and tuples have rows; name a leaf inside of it, or give None to pass it whole"
        )
    if dimension not in allowed:
        raise UsageError(f"split gives dimension {dimension} for {path!r}: allowed are {list(allowed)}, or None to pass it whole")


def _within(path: str, split: Split) -> bool:
    """Return whether `split` names something inside of the node at `path`."""
    return any(name and (not path or name.startswith(f"{path}.")) for name in split)


def _size(node: Any, dimension: int = 0) -> int:
    return int(node.shape[dimension]) if is_array(node) else len(node)


def _certain_sizes(node: Any, path: str, split: Split) -> Iterator[tuple[str, int]]:
    """Yield path and rows of all that can be read in one way only: not what lies in a list of which `split` says nothing."""
    if path in split:
        dimension = split[path]
        if dimension is not None:
            yield path, _size(node, dimension)
    elif is_array(node):
        if node.ndim:
            yield path, _size(node)
    elif not isinstance(node, list) or _within(path, split):
        for name, child in children(node) or []:
            yield from _certain_sizes(child, join_path(path, name), split)


def _candidates(node: Any, path: str, split: Split) -> set[int]:
    """Return the numbers of rows that `node` could have by its first leaf with rows; empty where nothing has rows."""
    if path in split:
        return set()
    if is_array(node):
        return {_size(node)} if node.ndim else set()
    found = {len(node)} if isinstance(node, list) and node else set()
    for name, child in children(node) or []:
        inner = _candidates(child, join_path(path, name), split)
        if inner:
            return found | inner
    return found


def _find_rows(batch: Batch, split: Split) -> int:
    """Return the number of rows on which all leaves agree, or refuse."""
    sizes = dict(_certain_sizes(batch, "", split))
    if len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    if sizes:
        raise _disagreement(sizes)
    if not any(is_array(leaf) and leaf.ndim for _, leaf in leaves(batch)):
        found = ", ".join(f"{path or 'the batch'}: {type(leaf).__name__}" for path, leaf in leaves(batch)) or "nothing"
        raise UsageError(
            f"the batch has no tensor with rows in it (it holds {found}): return tensors from the collate function, "
            f"or name the list of rows, as in split={{'texts': 0}}"
        )
    fitting = {rows for rows in _candidates(batch, "", split) if _fits(batch, "", rows, split)}
    if len(fitting) == 1:
        return fitting.pop()
    if not fitting:
        raise _disagreement({path: _size(leaf) for path, leaf in leaves(batch) if is_array(leaf) and leaf.ndim})
    if isinstance(batch, list) and any(is_array(child) and child.ndim for child in batch):
        inner = {rows for rows in fitting if _fits_inside(batch, "", rows, split)}
        if len(inner) == 1:  # [inputs, labels], as torch's default collate makes it of tuples
            return inner.pop()
    raise UsageError(
        f"the batch can be read as having {' or '.join(map(str, sorted(fitting)))} rows, because it holds only lists: "
        f"say what is a list of rows, as in split={{'images': 0}} (split={{'': 0}} for the batch itself)"
    )


def _fits(node: Any, path: str, rows: int, split: Split) -> bool:
    """Return whether `node` can be read as having `rows` rows."""
    if path in split:
        dimension = split[path]
        return dimension is None or _size(node, dimension) == rows
    if is_array(node):
        return not node.ndim or _size(node) == rows
    if isinstance(node, list) and len(node) in (0, rows):
        return True
    return _fits_inside(node, path, rows, split)


def _fits_inside(node: Any, path: str, rows: int, split: Split) -> bool:
    """Return whether `node` can be read as a container of things with `rows` rows."""
    inside = children(node) or []
    if isinstance(node, list) and not any(is_array(leaf) and leaf.ndim for _, leaf in leaves(node)):
        return False
    return all(_fits(child, join_path(path, name), rows, split) for name, child in inside)


def _rule(node: Any, path: str, rows: int, split: Split) -> Rule:
    """Return how to cut `node` of a batch that has `rows` rows."""
    if path in split:
        return split[path]
    if is_array(node):
        if isinstance(node, torch.Tensor) and node.layout != torch.strided:
            raise UsageError(
                f"{_name(path)} is a tensor of layout {node.layout}, which cannot be cut: give a dense tensor, or "
                f"split={{{path!r}: None}} to pass it whole to every micro-batch"
            )
        return 0 if node.ndim else None
    inside = children(node)
    if inside is None:
        if isinstance(node, ATOMS):
            return None
        raise UsageError(
            f"{_name(path)} is a {type(node).__qualname__}, which cannot be cut into micro-batches: allowed are "
            f"{_ALLOWED}; make it one of these, or give split={{{path!r}: None}} to pass it whole"
        )
    if isinstance(node, list) and _is_list_of_rows(node, path, rows, split):
        return 0
    rules = [_rule(child, join_path(path, name), rows, split) for name, child in inside]
    return rules if any(rule is not None for rule in rules) else None


def _is_list_of_rows(node: list[Any], path: str, rows: int, split: Split) -> bool:
    """Return whether the list has one entry per row (as against being a container), or refuse where that cannot be told."""
    if not node or _within(path, split):
        return False
    contains = _fits_inside(node, path, rows, split)
    if len(node) != rows:
        if contains:
            return False
        sizes = {join_path(path, name): _size(child) for name, child in leaves(node) if is_array(child) and child.ndim}
        raise _disagreement({_name(path): len(node)} | sizes, rows)
    if not contains or rows == 1:  # a single row is cut alike in both readings
        return True
    if not path and any(is_array(child) and child.ndim for child in node):
        return False  # [inputs, labels], as torch's default collate makes it of tuples, with two rows
    raise UsageError(
        f"{_name(path)} is a list of {rows} in a batch of {rows} rows and can be read in two ways: as one entry per "
        f"row (say split={{{path!r}: 0}}) or as {rows} things of {rows} rows each (name the leaves inside of it, as "
        f"in split={{{_first_leaf(node, path)!r}: 0}}); give one of the two, or make it a tensor or a tuple"
    )


def _first_leaf(node: Any, path: str) -> str:
    """Return the path of the first tensor or array with rows inside of `node`."""
    return next(join_path(path, name) for name, leaf in leaves(node) if is_array(leaf) and leaf.ndim)


def _name(path: str) -> str:
    return repr(path) if path else "the batch"


def _disagreement(sizes: Mapping[str, int], rows: int | None = None) -> UsageError:
    """Return the error for leaves that do not agree about the number of rows."""
    found = ", ".join(f"{path or 'the batch'}: {size}" for path, size in list(sizes.items())[:12])
    expected = "" if rows is None else f" in a batch of {rows} rows"
    return UsageError(
        f"the leaves of the batch disagree about the number of rows{expected} ({found}): every tensor, array and "
        f"list must have one entry per row along dimension 0; name those that do not, as in split={{'mask': 1}} for "
        f"another dimension or split={{'mask': None}} to pass it whole to every micro-batch"
    )
