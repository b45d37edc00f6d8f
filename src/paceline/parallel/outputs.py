"""What replicas returned for their rows, joined to what the module would have returned for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.tree import children, join_path, leaves, rebuild
from paceline.errors import UsageError


@dataclass
class Column:
    """One tensor of the output: the parts of it and the replicas that made them, and what they became.

    Parts without dimensions are averaged by `weights`; others, for which it is None, lie one behind the other.
    """

    parts: dict[int, Tensor]
    joined: Tensor
    weights: Sequence[float] | None

    @property
    def differentiable(self) -> bool:
        return any(part.requires_grad for part in self.parts.values())

    def gradient_of(self, replica: int, gradient: Tensor) -> Tensor:
        """Return the gradient of one replica's part, given that of the whole."""
        part = self.parts[replica]
        if self.weights is not None:
            return (gradient * self.weights[replica]).to(part.device)
        start = sum(len(other) for index, other in self.parts.items() if index < replica)
        return gradient.narrow(0, start, len(part)).to(part.device)


class Joining:
    """Joins outputs of replicas that worked on `rows` rows each, in the module's structure; `columns` are its tensors.

    Tensors are joined along dimension 0, in which they must have the same number of entries for every row. 0-dimensional ones
    become their mean, weighted by `weights`. Other values must be equal in all parts.
    """

    def __init__(self, rows: Sequence[int], weights: Sequence[float], device: torch.device | None) -> None:
        self._rows, self._device = list(rows), device
        total = sum(weights)
        self._weights = [weight / total for weight in weights] if total else [0.0 for _ in weights]
        self.columns: list[Column] = []

    def join(self, nodes: Sequence[Any], path: str = "") -> Any:
        """Return the joined output; its tensors are detached.

        Raises:
            UsageError: the outputs cannot be joined; the message says which.
        """
        first = nodes[0]
        if all(isinstance(node, Tensor) for node in nodes):
            return self._join_tensors(list(nodes), path)
        if len({type(node) for node in nodes}) > 1:
            raise _unlike(path, f"are of the types {', '.join(sorted({type(node).__name__ for node in nodes}))}")
        inside = [children(node) for node in nodes]
        if inside[0] is None:
            return self._join_values(nodes, path)
        if isinstance(first, list) and self._are_rows(nodes, path):
            return [self._as_row(entry, index) for index, node in enumerate(nodes) for entry in node]
        names = [[name for name, _ in found or []] for found in inside]
        if any(other != names[0] for other in names):
            raise _unlike(path, f"hold {' and '.join(str(other) for other in names)}")
        columns = zip(*([child for _, child in found or []] for found in inside), strict=True)
        joined = [self.join(column, join_path(path, name)) for name, column in zip(names[0], columns, strict=True)]
        return rebuild(first, joined)

    def _join_tensors(self, parts: list[Tensor], path: str) -> Tensor:
        detached = [part.detach().to(self._device or part.device) for part in parts]
        if parts[0].ndim == 0:
            joined = self._mean(detached, path)
            self.columns.append(Column(dict(enumerate(parts)), joined, self._weights))
            return joined
        shapes = [tuple(part.shape) for part in parts]
        per_row = {divmod(shape[0], rows) if shape else (0, 1) for shape, rows in zip(shapes, self._rows, strict=True)}
        if len(per_row) > 1 or per_row.pop()[1]:
            raise _unlike(path, f"have shapes {shapes} for {self._rows} rows, which is not one number of entries for every row")
        if len({shape[1:] for shape in shapes}) > 1:
            raise _unlike(path, f"have shapes {shapes}, which differ in more than dimension 0")
        joined = torch.cat(detached)
        self.columns.append(Column(dict(enumerate(parts)), joined, None))
        return joined

    def _mean(self, parts: list[Tensor], path: str) -> Tensor:
        if parts[0].is_floating_point() or parts[0].is_complex():
            weighted = [part * weight for part, weight in zip(parts, self._weights, strict=True) if weight]
            return torch.stack(weighted).sum(0) if weighted else torch.full_like(parts[0], torch.nan)
        if all(torch.equal(part, parts[0]) for part in parts):
            return parts[0].clone()
        raise _unlike(path, f"are whole numbers {[part.item() for part in parts]}, of which a mean says nothing")

    def _join_values(self, nodes: Sequence[Any], path: str) -> Any:
        if all(node is nodes[0] or (type(node) in (bool, int, float, str) and node == nodes[0]) for node in nodes):
            return nodes[0]
        raise _unlike(path, f"are {', '.join(repr(node)[:60] for node in nodes)}, which are no tensors and differ")

    def _are_rows(self, nodes: Sequence[list[Any]], path: str) -> bool:
        """Return whether the lists have one entry per row, as against being containers; refuse where both can be meant."""
        by_row = [len(node) for node in nodes] == self._rows
        contain = len({len(node) for node in nodes}) == 1 and all(
            all(isinstance(entry, Tensor) and entry.ndim and len(entry) % rows == 0 for entry in node)
            for node, rows in zip(nodes, self._rows, strict=True)
        )
        if by_row and contain and any(rows > 1 for rows in self._rows):
            raise _unlike(path, f"are lists of {self._rows} tensors for as many rows: entries of rows, or a container of wholes")
        return by_row and not (contain and len(nodes) == 1)

    def _as_row(self, entry: Any, replica: int) -> Any:
        """Return what is one row's own; it lies in one part alone."""
        if not isinstance(entry, Tensor):
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in leaves(entry)):
                raise UsageError("the output is a list of rows that are containers with gradients; return a list of tensors")
            return entry
        joined = entry.detach().to(self._device or entry.device).clone()
        self.columns.append(Column({replica: entry}, joined, None))
        return joined


def _unlike(path: str, what: str) -> UsageError:
    return UsageError(
        f"the outputs of the replicas at {path or 'the top'} {what}, and cannot be joined; return tensors with the rows in "
        "dimension 0 (pad them where lengths differ), tensors without dimensions to be averaged, or containers of them. "
        "A cache of a Hugging Face model is left out by use_cache=False"
    )
