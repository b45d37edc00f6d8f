"""The containers that a batch or an output may be made of: what is inside one, under which name, and how to make it anew.

Containers are mappings, tuples, named tuples, lists and dataclasses, nested at will. The name of a child is its key,
its index or its field name, and the path of a leaf is those names joined by dots: `inputs.pixels`, `1.boxes`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

Batch = Any
"""A tensor, an array or a container of them: whatever the user's collate function returns."""

ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    enum.Enum,
    pathlib.PurePath,
    torch.dtype,
    torch.device,
)
"""Values without rows: every micro-batch is given the same one."""


def is_array(node: Any) -> bool:
    """Return whether `node` is a tensor or a numpy array."""
    return isinstance(node, torch.Tensor | np.ndarray)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named children of a container, or None where `node` is a leaf.

    >>> children({"x": 1, "y": (2, 3)})
    [('x', 1), ('y', (2, 3))]
    >>> children("a leaf") is None
    True
    """
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, PackedSequence):  # a named tuple whose fields have no rows in common: not a container
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, tuple | list):
        return [(str(index), value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if hasattr(node, field.name)]
    return None


def rebuild(node: Any, values: list[Any]) -> Any:
    """Return a container like `node` with `values` in the place of its children, in the order of `children(node)`.

    The type is kept where its constructor takes what the container holds; otherwise a mapping becomes a dict, a list
    subclass a list. A dataclass is copied and its fields are set: `__post_init__` does not run again.
    """
    old = children(node)
    assert old is not None, "only containers are rebuilt"
    if all(value is child for value, (_, child) in zip(values, old, strict=True)):
        return node
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(node.keys(), values, strict=True)))
    if isinstance(node, tuple) and hasattr(node, "_make"):
        return node._make(values)
    if isinstance(node, tuple | list):
        plain: type = tuple if isinstance(node, tuple) else list
        try:
            return type(node)(values)
        except (TypeError, ValueError):
            return plain(values)
    new = copy.copy(node)
    for (name, _), value in zip(old, values, strict=True):
        object.__setattr__(new, name, value)  # reaches the fields of frozen dataclasses too
    return new


def _rebuild_mapping(node: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` as the type of `node`, or as a dict where the type cannot be made from them."""
    if type(node) is dict:
        return items
    make: Any = type(node)
    ways: list[Callable[[], Any]] = [lambda: make(items)]
    if dataclasses.is_dataclass(node):  # an output class of Hugging Face: a mapping whose constructor takes the fields
        ways.insert(0, lambda: make(**items))
    for way in ways:
        try:
            new = way()
            if list(new.keys()) == list(items) and all(new[key] is value for key, value in items.items()):
                return new  # type: ignore[no-any-return]
        except Exception:  # a constructor of the user's: whatever it objects to, a dict will do
            continue
    return items


def map_leaves(change: Callable[[Any], Any], node: Any) -> Any:
    """Return `node` with every leaf replaced by `change(leaf)`.

    >>> map_leaves(lambda leaf: leaf + 1, {"x": 1, "y": [2, (3,)]})
    {'x': 2, 'y': [3, (4,)]}
    """
    inside = children(node)
    if inside is None:
        return change(node)
    return rebuild(node, [map_leaves(change, child) for _, child in inside])


def join_path(path: str, name: str) -> str:
    """Return the path of the child called `name` of the container at `path`; the batch itself is at the empty path."""
    return f"{path}.{name}" if path else name


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf, in order.

    >>> list(leaves({"x": 1, "y": (2, 3)}))
    [('x', 1), ('y.0', 2), ('y.1', 3)]
    """
    inside = children(node)
    if inside is None:
        yield path, node
        return
    for name, child in inside:
        yield from leaves(child, join_path(path, name))


def find(node: Any, path: str) -> Any:
    """Return what lies at a dotted `path`; raise KeyError where there is nothing.

    >>> find({"x": 1, "y": (2, 3)}, "y.1")
    3
    """
    if not path:
        return node
    for name, child in children(node) or []:
        if path == name:
            return child
        if path.startswith(f"{name}."):
            try:
                return find(child, path[len(name) + 1 :])
            except KeyError:
                continue  # a key that has dots in it may begin like another
    raise KeyError(path)
