"""A worker's own module tree: a copy of the modules whose parameters share the first worker's memory, or have their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import UsageError

PLAIN = frozenset({bool, int, float, str, type(None)})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def replicate(model: nn.Module, device: torch.device, *, parameter_hooks: bool = True) -> nn.Module:
    """Return a copy of `model` for another worker thread, on `device`.

    On a CPU the copy's parameters are leaves of their own over the same memory, so what the owner of a weight writes is every
    worker's weight at once. On another device they are copied. Buffers are copied always. Tied parameters stay tied.
    Hooks on parameters are copied with them, unless `parameter_hooks` is False.

    Raises:
        UsageError: the module cannot be copied.
    """
    share = device.type == "cpu" and all(parameter.device.type == "cpu" for parameter in model.parameters())
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = parameter.data if share else parameter.data.to(device, copy=True)
        # Of the parameter's own class, with what the user has hung on it.
        copied = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
        vars(copied).update(vars(parameter))
        memo[id(parameter)] = copied
    try:
        replica = copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be copied for worker threads ({type(error).__name__}: {error}); "
            "run the workers as processes (transport='processes')"
        ) from error
    if not share:
        replica = replica.to(device)
    for parameter, copied in zip(model.parameters(), replica.parameters(), strict=True) if parameter_hooks else ():
        registers: list[Callable[..., Any]] = [copied.register_hook, copied.register_post_accumulate_grad_hook]
        for kind, register in zip(PARAMETER_HOOKS, registers, strict=True):
            for hook in _hooks_of(parameter, kind):
                register(hook)
    return replica


def _hooks_of(parameter: nn.Parameter, kind: str) -> list[Callable[..., Any]]:
    hooks = getattr(parameter, kind, None)
    return list(hooks.values()) if hooks else []


def check_initialised(model: nn.Module) -> None:
    """Raise `UsageError` where a lazy module has not seen its first input yet."""
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UsageError(f"the parameter {lazy[0]!r} of a lazy module has no shape yet; run one forward before training")


def mirror(source: nn.Module, target: nn.Module, *, parameter_hooks: bool = True) -> None:
    """Give a copy of the module what the user has set on it since: modes, frozen parameters, plain attributes.

    `parameter_hooks` says whether the copy was made with them.

    Raises:
        UsageError: modules, hooks or forwards have been added or taken away, which a copy cannot follow.
    """
    modules, copies = list(source.modules()), list(target.modules())
    if [type(module) for module in modules] != [type(module) for module in copies]:
        raise _changed("modules")
    for module, counterpart in zip(modules, copies, strict=True):
        values, copied = vars(module), vars(counterpart)
        for name, value in values.items():
            if type(value) in PLAIN and (name not in copied or copied[name] != value):
                copied[name] = value
        for hooks in HOOKS:
            if len(values[hooks]) != len(copied[hooks]):
                raise _changed(f"hooks of {type(module).__name__}")
        if ("forward" in values) != ("forward" in copied):
            raise _changed(f"the forward of {type(module).__name__}")
        # Not source.parameters(): this runs before every step, and each walk over the tree costs as much as all of the rest.
        for name, parameter in module._parameters.items():
            copy_of_it = counterpart._parameters.get(name)
            if (parameter is None) != (copy_of_it is None):
                raise _changed("parameters")
            if parameter is None or copy_of_it is None:
                continue
            for kind in PARAMETER_HOOKS if parameter_hooks else ():
                if len(_hooks_of(parameter, kind)) != len(_hooks_of(copy_of_it, kind)):
                    raise _changed("hooks of parameters")
            if copy_of_it.requires_grad != parameter.requires_grad:
                copy_of_it.requires_grad_(parameter.requires_grad)


def _changed(what: str) -> UsageError:
    return UsageError(
        f"{what} changed since the Trainer was made, and worker threads hold copies of the model; change the model before making "
        "the Trainer, or run the workers as processes (transport='processes')"
    )


def unit_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost submodule whose forward the exception passed through."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)]
        trace = trace.tb_next
    return found or None
