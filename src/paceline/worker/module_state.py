"""Buffers that a forward changes: folded in the order of the micro-batches, so that no layout shows in them.

BatchNorm in training mode moves its running statistics linearly: after k forwards that start from zero they hold a contribution c,
and after k forwards that start from r they hold (1 - momentum)**k * r + c. So every micro-batch starts from zero, all
workers exchange the contributions, and each folds them in micro-batch order. Other buffers are watched: with a rule the values that
the micro-batches left are merged by it, without one a change is refused as soon as there is more than one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError
from paceline.job import BufferRule
from paceline.transport.base import Transport
from paceline.worker.replica import PLAIN

SMALL = 2**16  # elements of a buffer that is compared whole
_ABSENT = object()
TORCH_BATCH_NORMS = frozenset({_BatchNorm.forward, nn.SyncBatchNorm.forward})


def folds(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether a module is a BatchNorm of torch's own whose running statistics can be folded."""
    return isinstance(module, _BatchNorm) and type(module).forward in TORCH_BATCH_NORMS and module.running_mean is not None


class ModuleState:
    """The buffers of one worker's module tree over one step at a time.

    `global_norms` says that BatchNorm's statistics are of the whole global batch already: every rank has the same contribution.
    """

    def __init__(self, model: nn.Module, rules: Mapping[str, BufferRule], transport: Transport, *, global_norms: bool) -> None:
        self._transport = transport
        self._norms = [module for module in model.modules() if folds(module)]
        self._global_norms = global_norms
        folded = {id(buffer) for norm in self._norms for buffer in norm.buffers(recurse=False)}
        self._model = model
        self._folded = folded
        names = {name for name, _ in model.named_buffers()}
        unknown = sorted(set(rules) - names)
        if unknown:
            has = ", ".join(sorted(names)) or "none"
            raise UsageError(f"buffers names {unknown[0]!r}, which is not a buffer of the model; it has {has}")
        self._rules = {name: rule for name, rule in rules.items() if rule != "cache"}
        self._caches = {name for name, rule in rules.items() if rule == "cache"}

    def begin(self) -> None:
        """Remember what the buffers hold before the step's first forward."""
        self._active = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        self._running = [[_of(norm, name).clone() for name in ("running_mean", "running_var")] for norm in self._active]
        self._counted = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in self._active]
        self._contributions: dict[int, Tensor] = {}
        buffers = dict(self._model.named_buffers())
        self._before = {name: buffers[name].clone() for name in self._rules}
        self._attributes_before = self._attributes()
        self._left: dict[int, dict[str, Tensor]] = {}
        watched = {
            name: buffer
            for name, buffer in buffers.items()
            if id(buffer) not in self._folded and name not in self._rules and name not in self._caches
        }
        self._watched = {name: (id(buffer), buffer._version) for name, buffer in watched.items()}
        # Kernels that write statistics, and whatever goes through `.data`, leave no mark on the version.
        small = {name: buffer for name, buffer in watched.items() if buffer.numel() <= SMALL and self._transport.size > 1}
        self._values = {name: buffer.clone() for name, buffer in small.items()}

    def before_forward(self) -> None:
        """Let the micro-batch start from zero statistics, and from the step's first values of the buffers that have a rule."""
        if self._active:
            torch._foreach_zero_([_of(norm, name) for norm in self._active for name in ("running_mean", "running_var")])
            for norm in self._active:
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.zero_()
        for name, value in self._before.items():
            self._model.get_buffer(name).copy_(value)

    def after_backward(self, micro_batch: int) -> None:
        """Keep what the micro-batch left. After the backward, since recomputation forwards once more."""
        if self._active:
            pieces = [
                piece.double().flatten()
                for norm in self._active
                for piece in (_of(norm, "running_mean"), _of(norm, "running_var"), self._calls(norm))
            ]
            self._contributions[micro_batch] = torch.cat(pieces)
        if self._rules:
            self._left[micro_batch] = {name: self._model.get_buffer(name).clone() for name in self._rules}

    @staticmethod
    def _calls(norm: _BatchNorm) -> Tensor:
        if norm.num_batches_tracked is None:  # an old module without a counter: one forward per micro-batch
            return _of(norm, "running_mean").new_ones(1)
        return norm.num_batches_tracked

    def changed(self) -> list[str]:
        """Return the names of buffers without a rule that this step's forwards changed or replaced."""
        buffers = dict(self._model.named_buffers())
        now = {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}
        marked = [name for name, mark in self._watched.items() if now.get(name) != mark]
        return marked + [
            name for name, value in self._values.items() if name not in marked and not torch.equal(value, buffers[name])
        ]

    def changed_attributes(self) -> dict[str, Any]:
        """Return the plain attributes that this step's forwards changed, by the names of module and attribute."""
        return {name: value for name, value in self._attributes().items() if self._attributes_before.get(name) != value}

    def _attributes(self) -> dict[str, Any]:
        if self._transport.size == 1:
            return {}
        modules = self._model.named_modules()
        return {f"{name}.{key}": value for name, module in modules for key, value in vars(module).items() if type(value) in PLAIN}

    def check(self, changed: Sequence[str], attributes: Sequence[Mapping[str, Any]]) -> None:
        """Raise `UsageError` where workers changed, by their own micro-batches only, what nobody can merge.

        Args:
            changed: buffers without a rule that some rank's forwards changed.
            attributes: each rank's changed plain attributes; they are no one's to merge, and must have become equal.
        """
        for name in sorted({name for one in attributes for name in one}):
            if any(one.get(name, _ABSENT) != attributes[0].get(name, _ABSENT) for one in attributes):
                raise UsageError(
                    f"the forward sets the attribute {name.lstrip('.')}, and workers set it to different values; "
                    "make it a buffer with a rule (Job(buffers=...)), do not set it in the forward, or train with replicas=1"
                )
        if changed and self._transport.size > 1:
            raise UsageError(
                f"the forward changes the buffer(s) {', '.join(changed)}, and each of {self._transport.size} workers sees "
                f"only its own micro-batches; pass Job(buffers={{{changed[0]!r}: RULE}}) with sum, mean, max, min, last, or a "
                "function(before, values), or cache where each worker may keep its own, or train with replicas=1"
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the same folded values on every rank. Collective."""
        if self._active:
            contributions = _exchange(self._transport, self._contributions, self._running[0][0].device)
            self._fold(contributions[:1] if self._global_norms else contributions)
        if self._rules:
            gathered = self._transport.gather_objects(self._left)
            left = {micro_batch: values for part in gathered for micro_batch, values in part.items()}
            for name, rule in self._rules.items():
                buffer = self._model.get_buffer(name)
                values = [left[micro_batch][name].to(buffer.device) for micro_batch in sorted(left)]
                buffer.copy_(merge(rule, self._before[name], values) if values else self._before[name])

    def restore(self) -> None:
        """Put back what the buffers held before the step, after a failure in it."""
        for norm, running, counted in zip(self._active, self._running, self._counted, strict=True):
            for name, value in zip(("running_mean", "running_var"), running, strict=True):
                _of(norm, name).copy_(value)
            if counted is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counted)
        for name, value in self._before.items():
            self._model.get_buffer(name).copy_(value)

    def _fold(self, contributions: Sequence[Tensor]) -> None:
        offset = 0
        for norm, before, counted in zip(self._active, self._running, self._counted, strict=True):
            size = before[0].numel()
            running = torch.stack(before).double()
            count = 0.0 if counted is None else float(counted)
            for contribution in contributions:
                moved = contribution[offset : offset + 2 * size].view(2, size)
                calls = float(contribution[offset + 2 * size])
                if not calls:
                    continue
                if norm.momentum is None:  # the average over all forwards so far
                    running = (count * running + calls * moved) / (count + calls)
                else:
                    running = (1 - norm.momentum) ** calls * running + moved
                count += calls
            _of(norm, "running_mean").copy_(running[0])
            _of(norm, "running_var").copy_(running[1])
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(count)
            offset += 2 * size + 1


def merge(rule: BufferRule, before: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return what a buffer becomes by its rule, from the values that the micro-batches left, in their order.

    >>> merge("sum", torch.tensor(3), [torch.tensor(4), torch.tensor(5)])
    tensor(6)
    """
    if callable(rule):
        return rule(before, list(values))
    stacked = torch.stack(list(values))
    if rule == "sum":
        return before + (stacked - before).sum(0).to(before.dtype)
    if rule == "mean":
        return stacked.double().mean(0).to(before.dtype)
    if rule == "max":
        return stacked.amax(0)
    if rule == "min":
        return stacked.amin(0)
    return values[-1]


def _exchange(transport: Transport, mine: dict[int, Tensor], device: torch.device) -> list[Tensor]:
    """Return the contributions of all ranks in the order of their micro-batches; ranks hold ascending runs."""
    stacked = torch.stack([mine[k] for k in sorted(mine)]) if mine else torch.zeros(0, 0, dtype=torch.float64, device=device)
    return [row for part in transport.gather(stacked) for row in part]


def _of(norm: _BatchNorm, name: str) -> Tensor:
    value = getattr(norm, name)
    assert isinstance(value, Tensor)
    return value
