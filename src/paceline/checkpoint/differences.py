"""Two states beside each other, and one in a few lines."""

from __future__ import annotations

import datetime
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.reading import is_weights, read_state
from paceline.checkpoint.state import OptimizerState, State
from paceline.checkpoint.tensor_files import dtype_name

NOTHING = object()


@dataclass(frozen=True)
class Difference:
    """One value that two states do not agree on.

    Args:
        path: where it is: `weights/h.0.weight`, `optimizers/loss/entries/h.0.weight/exp_avg`, `progress/epoch`.
        message: what is different, in words.
        largest: the largest difference of two numbers, where both are numbers or tensors of one shape; NaN where one of them is.
    """

    path: str
    message: str
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def compare(a: State, b: State) -> list[Difference]:
    """Return every value in which two states differ, to the last bit; nothing where they are the same.

    >>> a, b = (State(weights={"w": torch.tensor([1.0, w])}, progress={"steps_done": 1}) for w in (2.0, 2.5))
    >>> for difference in compare(a, b):
    ...     print(difference)
    weights/w: 1 of 2 elements differ, by up to 0.5
    """
    return list(_differences(_plain(a), _plain(b), ""))


def _plain(value: State | OptimizerState) -> dict[str, Any]:
    return {part.name: getattr(value, part.name) for part in fields(value)}


def _differences(a: Any, b: Any, path: str) -> Iterator[Difference]:
    if isinstance(a, OptimizerState) and isinstance(b, OptimizerState):
        a, b = _plain(a), _plain(b)
    if a is NOTHING or b is NOTHING:
        yield Difference(path, f"only in the {'second' if a is NOTHING else 'first'}")
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        yield from _tensors(a, b, path)
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield Difference(path, f"{a.dtype} {a.shape} and {b.dtype} {b.shape}")
        elif a.tobytes() != b.tobytes():
            yield Difference(path, f"arrays of {a.size} elements differ")
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from _differences(a.get(key, NOTHING), b.get(key, NOTHING), f"{path}/{key}".removeprefix("/"))
    elif isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque) and len(a) == len(b) and type(a) is type(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{path}/{index}")
    elif type(a) is not type(b) or not _equal(a, b):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
        yield Difference(path, f"{a!r:.80} and {b!r:.80}", float(abs(a - b)) if numbers else None)


def _equal(a: Any, b: Any) -> bool:
    # As text a NaN equals itself, and zeros have signs.
    return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)


def _tensors(a: Tensor, b: Tensor, path: str) -> Iterator[Difference]:
    if a.shape != b.shape or a.dtype != b.dtype:
        one, other = (f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for tensor in (a, b))
        yield Difference(path, f"{one} and {other}")
        return
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in (a, b)]
    size = a.element_size()
    unequal = (flat[0].view(torch.uint8) != flat[1].view(torch.uint8)).reshape(-1, size).any(1) if a.numel() else torch.zeros(0)
    number = int(unequal.sum())
    if number:
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (flat[0][unequal].to(wide) - flat[1][unequal].to(wide)).abs()
        largest = float(apart.max())
        yield Difference(path, f"{number} of {a.numel()} elements differ, by up to {largest:.6g}", largest)


def describe(path: str | os.PathLike[str]) -> str:
    """Return in a few lines what a checkpoint holds, after verifying it.

    Raises:
        CheckpointError: it is damaged.
    """
    path = Path(path)
    manifest, state = read_manifest(path), read_state(path)
    weights = [of for file, part in manifest.files.items() if is_weights(file) for of in part.tensors.values()]
    elements = sum(int(np.prod(of.shape, dtype=np.int64)) for of in weights)
    dtypes = ", ".join(sorted({of.dtype for of in weights}))
    when = datetime.datetime.fromtimestamp(manifest.saved_ns / 1e9).astimezone()
    lines = [
        ("checkpoint", f"{path}{', the best so far' if manifest.best else ''}"),
        ("saved", f"{when:%Y-%m-%d %H:%M:%S %z}, after step {manifest.steps_done}"),
        ("weights", f"{len(weights)} tensors, {elements:,} elements, {dtypes or 'none'}; {len(manifest.aliases)} tied names"),
        *((f"optimizer {name}", _optimizer_words(of)) for name, of in state.optimizers.items()),
        ("progress", _words(state.progress)),
        ("facts", _words(state.facts)),
        ("objects", ", ".join(state.objects) or "none"),
        ("files", ", ".join(f"{name} {size:,}" for name, size in manifest.sizes.items())),
    ]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}{text}" for name, text in lines)


def _optimizer_words(state: OptimizerState) -> str:
    rates = ", ".join(f"{float(group['lr']):.6g}" for group in state.groups if "lr" in group)
    total = sum(len(group["params"]) for group in state.groups)
    return f"{state.kind}, {len(state.groups)} group(s) of {total} parameters, {len(state.entries)} with state, lr {rates}"


def _words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if isinstance(value, bool | int | float | str)) or "none"
