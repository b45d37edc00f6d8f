"""Whether a state belongs to a model and its optimizers, told before anything is loaded: every name that does not fit."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from paceline.checkpoint.optimizers import optimizer_misfits
from paceline.checkpoint.state import State
from paceline.checkpoint.tensor_files import dtype_name

# What wrappers put before the names of the module inside.
PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "model.")


@dataclass(frozen=True)
class Misfit:
    """One thing that does not fit: `dtype` can be loaded all the same, with rounding; nothing else can.

    Args:
        kind: what is wrong. `missing` is wanted by the model and not in the state; `unexpected` the other way round.
        name: the weight or the optimizer that it is about.
        message: the same in words, with what to do where that can be told.
    """

    kind: Literal["missing", "unexpected", "shape", "dtype", "optimizer"]
    name: str
    message: str

    def __str__(self) -> str:
        return self.message


def fits(state: State, weights: Mapping[str, Any], optimizers: Mapping[str, Sequence[Sequence[str]]] | None = None) -> list[Misfit]:
    """Return everything that keeps a state from being loaded into a model and its optimizers; nothing where it fits.

    Args:
        state: what would be loaded.
        weights: the model's `state_dict()`, or anything by name that has a `shape` and a `dtype`.
        optimizers: for each loss the names of the parameters in each group, as from `group_names`; None looks at weights alone.

    >>> state = State(weights={"module.w": torch.zeros(2)}, progress={"steps_done": 0})
    >>> for misfit in fits(state, {"w": torch.zeros(2)}):
    ...     print(misfit)
    w is missing; the state has 'module.w': take the prefix 'module.' off its names
    module.w is unexpected
    """
    misfits = weight_misfits(state.weights, weights)
    if optimizers is not None:
        misfits += _optimizers(state, optimizers)
    return misfits


def weight_misfits(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Misfit]:
    """Return what keeps saved weights from being those of a model: missing, unexpected, of another shape or dtype."""
    unexpected = [name for name in saved if name not in wanted]
    misfits = [Misfit("missing", name, f"{name} is missing{_hint(name, unexpected)}") for name in wanted if name not in saved] + [
        Misfit("unexpected", name, f"{name} is unexpected") for name in unexpected
    ]
    for name, want in wanted.items():
        have = saved.get(name)
        if name not in saved or not isinstance(have, Tensor) or not hasattr(want, "shape"):
            continue
        if tuple(have.shape) != tuple(want.shape):
            text = f"{name} has the shape {tuple(have.shape)}, the model wants {tuple(want.shape)}"
            misfits.append(Misfit("shape", name, text))
        elif have.dtype != want.dtype:
            text = f"{name} is {dtype_name(have.dtype)}, the model wants {dtype_name(want.dtype)}"
            misfits.append(Misfit("dtype", name, text))
    return misfits


def _optimizers(state: State, optimizers: Mapping[str, Sequence[Sequence[str]]]) -> list[Misfit]:
    misfits = []
    for name, groups in optimizers.items():
        if name not in state.optimizers:
            have = ", ".join(state.optimizers) or "none"
            misfits.append(Misfit("optimizer", name, f"there is no state of the optimizer of {name!r}; the state has {have}"))
            continue
        of = state.optimizers[name]
        misfits += [
            Misfit("optimizer", name, f"optimizer of {name!r}: {problem}") for problem in optimizer_misfits(of, None, groups)
        ]
    misfits += [
        Misfit("optimizer", name, f"the state's optimizer of {name!r} has no counterpart: the job has no loss of that name")
        for name in state.optimizers
        if name not in optimizers
    ]
    return misfits


def _hint(name: str, candidates: Iterable[str]) -> str:
    candidates = list(candidates)
    for prefix in PREFIXES:
        if prefix + name in candidates:
            return f"; the state has {prefix + name!r}: take the prefix {prefix!r} off its names"
        if name.startswith(prefix) and name.removeprefix(prefix) in candidates:
            return f"; the state has {name.removeprefix(prefix)!r}: load into the module without its wrapper, which adds {prefix!r}"
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
    return f"; the nearest name in the state is {close[0]!r}" if close else ""
