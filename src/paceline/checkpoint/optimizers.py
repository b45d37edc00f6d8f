"""An optimizer's state by the names of its parameters, and back into an optimizer over the same names in any order."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from paceline.checkpoint.state import OptimizerState
from paceline.errors import UsageError

Named: TypeAlias = Iterable[tuple[str, nn.Parameter]]
# How the step is computed, not what: these stay as the optimizer that is loaded into was made.
WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")
NAMED_BY_TORCH = "param_names"


def optimizer_state(optimizer: Optimizer, named_parameters: Named) -> OptimizerState:
    """Return what an optimizer remembers, keyed by name; its tensors are the optimizer's own, not copies.

    Args:
        optimizer: any torch optimizer over parameters among those named.
        named_parameters: as from `model.named_parameters()`; of several names for one parameter the first is used.

    Raises:
        UsageError: the optimizer holds a parameter that has no name.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(2)).backward()
    >>> optimizer.step()
    >>> state = optimizer_state(optimizer, model.named_parameters())
    >>> state.groups[0]["params"], sorted(state.entries), sorted(state.entries["bias"])
    (['weight', 'bias'], ['bias', 'weight'], ['momentum_buffer'])
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), name)
    parameters = _held(optimizer, names)
    saved = optimizer.state_dict()
    ordered = list(parameters)
    groups = [
        {
            **{key: value for key, value in group.items() if key != NAMED_BY_TORCH},
            "params": [ordered[index] for index in group["params"]],
        }
        for group in saved["param_groups"]
    ]
    entries = {ordered[key]: entry for key, entry in saved["state"].items() if isinstance(key, int)}
    extras = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    unkeyed = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    return OptimizerState(
        kind=type(optimizer).__name__,
        groups=groups,
        entries={name: entries[name] for name in ordered if name in entries},
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        extras=extras | ({"state": unkeyed} if unkeyed else {}),
    )


def load_optimizer(optimizer: Optimizer, named_parameters: Named, state: OptimizerState) -> None:
    """Put a state back, bit for bit: every entry keeps its dtype, whatever the dtype of its parameter is.

    Hyper-parameters become those of the state; `foreach`, `fused`, `capturable` and `differentiable` stay as they are. Nothing is
    changed where this raises.

    Raises:
        UsageError: the optimizer is of another class, groups its parameters otherwise, or a parameter has another shape.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), []).append(name)
    # A tied parameter may have been saved under any of its names.
    known = {identity: next((name for name in of if name in state.shapes), of[0]) for identity, of in names.items()}
    parameters = _held(optimizer, known)
    ordered = list(parameters)
    current = [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    problems = optimizer_misfits(state, type(optimizer).__name__, current, {name: tuple(p.shape) for name, p in parameters.items()})
    if problems:
        raise UsageError(f"the state does not fit the optimizer: {'; '.join(problems)}")
    saved_groups: dict[frozenset[str], list[dict[str, Any]]] = {}
    for group in state.groups:
        saved_groups.setdefault(frozenset(group["params"]), []).append(group)
    index = {name: number for number, name in enumerate(ordered)}
    matched = [saved_groups[frozenset(group)].pop(0) for group in current]
    groups = [
        {
            **{key: _beside(value, own.get(key)) for key, value in saved.items()},
            **{key: own[key] for key in WAYS_TO_COMPUTE if key in own},
            "params": [index[name] for name in mine],
        }
        for own, saved, mine in zip(optimizer.param_groups, matched, current, strict=True)
    ]
    placed = {
        name: {
            key: _placed(value, parameters[name], on_device=key != "step" or any(group.get(key) for key in ("fused", "capturable")))
            for key, value in state.entries[name].items()
        }
        for mine, group in zip(current, groups, strict=True)
        for name in mine
        if name in state.entries
    }
    unkeyed = state.extras.get("state", {})
    extras = {key: copy.deepcopy(value) for key, value in state.extras.items() if key != "state"}
    entries = {index[name]: entry for name, entry in placed.items()}
    optimizer.load_state_dict({**extras, "state": entries | copy.deepcopy(unkeyed), "param_groups": groups})
    # torch has rounded the entries to their parameters' dtypes; these have not been.
    for name, entry in placed.items():
        optimizer.state[parameters[name]] = entry


def group_names(optimizer: Optimizer, named_parameters: Named) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer, as `fits` wants them."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), name)
    _held(optimizer, names)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def optimizer_misfits(
    state: OptimizerState, kind: str | None, groups: Sequence[Sequence[str]], shapes: dict[str, tuple[int, ...]] | None = None
) -> list[str]:
    """Return what keeps a state from being loaded into an optimizer of this class with these groups; nothing where it fits."""
    if kind is not None and kind != state.kind:
        return [f"it is of {state.kind}, and the optimizer is {kind}"]
    saved = {name: number for number, group in enumerate(state.groups) for name in group["params"]}
    current = {name: number for number, group in enumerate(groups) for name in group}
    problems = [f"parameter {name} is in the optimizer and not in the state" for name in current if name not in saved]
    problems += [f"parameter {name} is in the state and not in the optimizer" for name in saved if name not in current]
    for name, shape in (shapes or {}).items():
        if name in saved and shape != state.shapes[name]:
            problems.append(f"parameter {name} has the shape {shape}, in the state {state.shapes[name]}")
    if problems:
        return problems
    if len(groups) != len(state.groups):
        return [f"it has {len(state.groups)} parameter group(s), the optimizer {len(groups)}"]
    for name, number in current.items():
        mine, theirs = set(groups[number]), set(state.groups[saved[name]]["params"])
        if mine != theirs:
            other = sorted(mine ^ theirs)[0]
            return [
                f"its parameters are grouped otherwise: {name} and {other} are in one group in the "
                f"{'optimizer' if other in mine else 'state'}, and in two in the {'state' if other in mine else 'optimizer'}"
            ]
    if state.kind == LBFGS.__name__ and list(saved) != list(current):
        return ["LBFGS keeps one vector over all parameters in their order, and the order is another"]
    return []


def _held(optimizer: Optimizer, names: dict[int, str]) -> dict[str, nn.Parameter]:
    """Return an optimizer's parameters by name, in the order in which torch numbers them."""
    parameters: dict[str, nn.Parameter] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise UsageError(
                    f"the optimizer {type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that has no name "
                    "among those given; pass the named parameters of the module that it was built over"
                )
            parameters[name] = parameter
    return parameters


def _placed(value: Any, parameter: nn.Parameter, *, on_device: bool) -> Any:
    """Return a copy of an entry of the state where the optimizer wants it."""
    if isinstance(value, Tensor):
        device = parameter.device if on_device else torch.device("cpu")
        if value.shape == parameter.shape and value.dim():
            # Fused kernels walk entry and parameter in memory order, so the strides must be the parameter's.
            return torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False).copy_(value)
        return value.detach().to(device, copy=True)
    if type(value) is dict:
        return {key: _placed(inner, parameter, on_device=on_device) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(inner, parameter, on_device=on_device) for inner in value)
    return copy.deepcopy(value)


def _beside(value: Any, own: Any) -> Any:
    """Return a copy of a hyper-parameter, a tensor on the device where the optimizer has its own."""
    if isinstance(value, Tensor):
        return value.detach().to(own.device if isinstance(own, Tensor) else "cpu", copy=True)
    return copy.deepcopy(value)
