"""Everything that a run is, as one frozen value without a word on how many workers held it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What an optimizer remembers, keyed by the names of parameters, so that it fits any order and any layout of them.

    Args:
        kind: the optimizer's class, as it is called.
        groups: one dict for each parameter group: its hyper-parameters, and under `params` the names of its parameters.
        entries: for each parameter that has been updated, what is kept for it: tensors, numbers, nested values.
        shapes: the shape of each parameter.
        extras: what the optimizer's own `state_dict` holds besides, keyed by anything but parameters.
    """

    kind: str
    groups: list[dict[str, Any]]
    entries: dict[str, dict[str, Any]]
    shapes: dict[str, tuple[int, ...]]
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class State:
    """A run between two steps.

    Tensors may lie on any device when it is saved; after loading they are on the CPU and backed by the checkpoint's files,
    read from disk once and shared with other processes until they are written to.

    Args:
        weights: `model.state_dict()`; names that are tied keep one storage. Extra state that is not a tensor may be among them.
        optimizers: by the name of their loss.
        schedulers: state dicts of the schedulers, by the name of their loss.
        progress: counters and results so far, as plain values; `steps_done` names the checkpoint.
        random: states of the process's generators, as `random_states` returns them.
        objects: state dicts of whatever else belongs to the run, by name.
        facts: what the run was: versions, plan, job, seed, thread and worker counts.

    >>> State(weights={"w": torch.zeros(2)}, progress={"steps_done": 3}).steps_done
    3
    """

    weights: dict[str, Any]
    progress: dict[str, Any]
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = self.progress.get("steps_done")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise UsageError(f"progress['steps_done']={steps!r} was given; it names the checkpoint: pass the number of steps taken")

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps taken."""
        return int(self.progress["steps_done"])


def with_versions(weights: dict[str, Any], versions: Any) -> dict[str, Any]:
    """Return weights that carry what `state_dict()` notes of its modules' versions, by which `load_state_dict` reads old ones."""
    if versions is None:
        return weights
    carrying: Any = OrderedDict(weights)
    carrying._metadata = versions
    kept: dict[str, Any] = carrying
    return kept


def versions_of(weights: dict[str, Any]) -> Any:
    """Return what `state_dict()` noted of its modules' versions; None where nothing did."""
    return getattr(weights, "_metadata", None)


def snapshot(state: State) -> State:
    """Return the state with copies of all tensors on the CPU, so that training can go on while it is saved; ties stay ties."""
    copies: dict[Any, Tensor] = {}
    parts = {part.name: _copied(getattr(state, part.name), copies) for part in fields(state)}
    parts["weights"] = with_versions(parts["weights"], copy.deepcopy(versions_of(state.weights)))
    return replace(state, **parts)


def _copied(value: Any, copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = view_key(value)
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, OptimizerState):
        return OptimizerState(**{part.name: _copied(getattr(value, part.name), copies) for part in fields(value)})
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _copied(inner, copies)) for name, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied(inner, copies) for inner in value)
    return copy.deepcopy(value)


def view_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells views apart: equal keys mean the same elements in memory. An empty tensor is only itself."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    start = tensor.untyped_storage().data_ptr()
    return (start, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
