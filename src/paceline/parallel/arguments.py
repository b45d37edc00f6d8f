"""The arguments of a call, cut into the parts that replicas work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import even_sizes, take_rows
from paceline.data.rows import Rule, Split, split_rule
from paceline.data.tree import children, leaves, rebuild
from paceline.errors import UsageError


@dataclass
class Part:
    """One replica's arguments, positional ones under the names `0`, `1`, ..., and its leaves that need gradients."""

    arguments: dict[str, Any]
    num_positional: int
    start: int
    rows: int
    origins: list[Origin] = field(default_factory=list)

    @property
    def args(self) -> list[Any]:
        return [self.arguments[str(index)] for index in range(self.num_positional)]

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(list(self.arguments.items())[self.num_positional :])

    def __str__(self) -> str:
        return f"row {self.start}" if self.rows == 1 else f"rows {self.start} to {self.start + self.rows - 1}"


@dataclass
class Origin:
    """A leaf that a replica's graph begins with: the caller's tensor `source`, or its part at `start` along `dimension`."""

    source: Tensor
    leaf: Tensor
    dimension: int | None
    start: int


def cut(args: Sequence[Any], kwargs: Mapping[str, Any], parts: int, split: Split) -> list[Part]:
    """Return the arguments cut into at most `parts` parts of even size, the larger first, none of them empty.

    Tensors are cut as `data.batch.split_batch` cuts a batch. Those that require gradients become leaves of the part's own.

    Raises:
        UsageError: the rows cannot be told, or there are none.
    """
    arguments = {**{str(index): argument for index, argument in enumerate(args)}, **kwargs}
    known = {path: dimension for path, dimension in split.items() if path.split(".")[0] in arguments}
    rows, rule = split_rule(arguments, known)
    if not rows:
        raise UsageError("the call's tensors have 0 rows, so there is nothing to compute; leave empty batches out")
    result, start = [], 0
    for size in even_sizes(rows, parts):
        if size:
            part = Part({}, len(args), start, size)
            part.arguments = dict(_take(arguments, rule, start, start + size, part.origins))
            result.append(part)
        start += size
    return result


def _take(node: Any, rule: Rule, start: int, stop: int, origins: list[Origin]) -> Any:
    """Return rows `start` to `stop` of a node; tensors in it that require gradients are noted in `origins`."""
    if not torch.is_grad_enabled() or not any(isinstance(leaf, Tensor) and leaf.requires_grad for _, leaf in leaves(node)):
        return take_rows(node, rule, start, stop)
    if isinstance(node, Tensor):
        piece = take_rows(node.detach(), rule, start, stop) if isinstance(rule, int) else node.detach()
        leaf = piece.requires_grad_()
        origins.append(Origin(node, leaf, rule if isinstance(rule, int) else None, start))
        return leaf
    if isinstance(rule, int):  # a list with one entry per row: each entry is one part's
        return [_take(child, None, 0, 0, origins) for child in node[start:stop]]
    inside = children(node) or []
    rules: list[Rule] = rule if isinstance(rule, list) else [None] * len(inside)
    return rebuild(node, [_take(child, of, start, stop, origins) for (_, child), of in zip(inside, rules, strict=True)])


def sum_origins(source: Tensor, origins: Sequence[Origin], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the gradient of a caller's tensor from those of the leaves that were cut from it; None where none was used."""
    total: Tensor | None = None
    for origin, gradient in zip(origins, gradients, strict=True):
        if gradient is None:
            continue
        total = torch.zeros_like(source) if total is None else total
        place = total
        if origin.dimension is not None:
            place = total.narrow(origin.dimension, origin.start, gradient.shape[origin.dimension])
        place += gradient.to(total.device)
    return total
