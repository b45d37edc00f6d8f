"""One named loss on one worker: its parameters, their gradients, and the optimizer and scheduler where this worker updates them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.job import Loss, MakeOptimizer, check_owned, takes_total_steps
from paceline.worker.gradients import Gradients


class Objective:
    """A loss with everything that its update needs; `optimizer` is None on a worker that leaves the update to another."""

    def __init__(
        self, name: str, loss: Loss, parameters: dict[str, nn.Parameter], optimizer: Optimizer | None, gradients: Gradients
    ) -> None:
        self.name, self.loss, self.parameters = name, loss, parameters
        self.optimizer, self.gradients = optimizer, gradients
        self.scheduler: Any = None
        self._reload: Callable[[], None] | None = None
        self._saved_schedule: dict[str, Any] | None = None

    def schedule(self, make: Callable[..., Any], total_steps: int | None) -> None:
        """Make the scheduler, once, before the first update."""
        if self.optimizer is None or self.scheduler is not None:
            return
        if not takes_total_steps(make):
            self.scheduler = make(self.optimizer)
        elif total_steps is None:
            raise UsageError(
                "scheduler(optimizer, total_steps) needs the number of steps, which is not known; train with batches(steps=...) or "
                "fit(steps=...), pass Trainer(total_steps=...), or a scheduler of the optimizer alone"
            )
        else:
            self.scheduler = make(self.optimizer, total_steps)
        if not hasattr(self.scheduler, "step"):
            raise UsageError(f"scheduler returned {self.scheduler!r}, which has no step(); return a torch LR scheduler")
        if self._reload is not None:
            self._reload()  # making the scheduler has set the learning rate of its first step
        if self._saved_schedule is not None:
            self.scheduler.load_state_dict(self._saved_schedule)
        self._reload = self._saved_schedule = None

    def put_back(self, reload: Callable[[], None], schedule: dict[str, Any] | None) -> None:
        """Load the optimizer's saved state with `reload`, and the scheduler's as soon as there is a scheduler."""
        reload()
        if self.scheduler is None:
            self._reload, self._saved_schedule = reload, schedule
        elif schedule is not None:
            self.scheduler.load_state_dict(schedule)

    def schedule_state(self) -> dict[str, Any] | None:
        """Return what the scheduler remembers; None where there is none."""
        if self.scheduler is None:
            return self._saved_schedule
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def advance(self, loss: Callable[[], float]) -> None:
        """Step the scheduler, with the loss where it goes by that."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss())
        elif self.scheduler is not None:
            self.scheduler.step()

    @property
    def lr(self) -> float | None:
        """The learning rate of the first parameter group; None on a worker that does not update."""
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def update(self, factor: float | Tensor, clip_norm: float | None) -> Tensor | None:
        """Multiply the gradients by `factor`, clip them, let the optimizer step; return the norm before clipping where asked for.

        The norm is over all parameters: of the per-parameter norms in the order of the parameters, so it is the same in any layout.
        """
        assert self.optimizer is not None
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = None
        scale = factor
        if clip_norm is not None:
            norm = total_norm(gradients) * factor
            if math.isfinite(clip_norm):
                scale = factor * torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        if isinstance(scale, Tensor) and scale.device.type != "cpu":  # reading it would wait for the GPU
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device, gradient.dtype))
        elif gradients and float(scale) != 1.0:
            torch._foreach_mul_(gradients, float(scale))
        self.optimizer.step()
        return norm


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all tensors together, in double precision; 0 for none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = [norm.double().to(tensors[0].device) for norm in torch._foreach_norm(list(tensors))]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def build_optimizer(make: MakeOptimizer, model: nn.Module, name: str) -> Optimizer:
    """Return the optimizer that a job gives for a module, checked to hold parameters of that module and no others."""
    if isinstance(make, Optimizer):
        check_owned(make, model)
        _check_step(make)
        return make
    named = [(parameter_name, parameter) for parameter_name, parameter in model.named_parameters()]
    if not named:
        raise UsageError(f"the model {type(model).__name__} has no parameters, so there is nothing to train; pass another model")
    optimizer = make(named)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer function of {name!r} returned {optimizer!r}; return one torch optimizer")
    check_owned(optimizer, model)
    _check_step(optimizer)
    return optimizer


def _check_step(optimizer: Optimizer) -> None:
    """Raise `UsageError` for an optimizer that wants to compute losses itself, several times within a step."""
    try:
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):
        return
    if any(parameter.name == "closure" and parameter.default is parameter.empty for parameter in parameters):
        raise UsageError(
            f"{type(optimizer).__name__} needs a closure that computes the loss again, and a step computes it once; "
            "use an optimizer whose step() can be called alone, such as AdamW or SGD"
        )


def copy_optimizer(optimizer: Optimizer, source: nn.Module, target: nn.Module) -> Optimizer:
    """Return a fresh optimizer of the same kind and settings over the same parameters of a copy of the module."""
    counterpart = {id(p): q for p, q in zip(source.parameters(), target.parameters(), strict=True)}
    groups = [{**group, "params": [counterpart[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    make: Any = type(optimizer)
    taken = inspect.signature(make).parameters  # some defaults are set by the class itself (AdamW's way of decay)
    copied: Optimizer = make(groups, **{name: value for name, value in optimizer.defaults.items() if name in taken})
    return copied


def held_by(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the parameters that an optimizer holds, in the model's order."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in held]
