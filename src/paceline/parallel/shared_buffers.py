"""A module's buffers on several ranks: BatchNorm's statistics of all of them, and no others that drift apart unnoticed.

BatchNorm moves its running statistics linearly: k forwards from r leave (1 - momentum)**k * r + c. What a rank's forwards since the
last exchange have contributed, k and c, is read off the buffers, so it does not matter how the module was called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError
from paceline.job import BufferRule
from paceline.transport.base import Transport
from paceline.worker.module_state import folds, merge


class SharedBuffers:
    """Keeps the buffers of `model` equal on all ranks; `rules` say what becomes of buffers that the forward changes."""

    def __init__(self, model: nn.Module, rules: Mapping[str, BufferRule], transport: Transport) -> None:
        self._model, self._transport = model, transport
        names = {name for name, _ in model.named_buffers()}
        unknown = sorted(set(rules) - names)
        if unknown:
            has = ", ".join(sorted(names)) or "none"
            raise UsageError(f"buffers names {unknown[0]!r}, which is not a buffer of the module; it has {has}")
        self._rules = {name: rule for name, rule in rules.items() if rule != "cache"}
        self._caches = {name for name, rule in rules.items() if rule == "cache"}
        # torch's SyncBatchNorm moves its statistics by all ranks' rows already.
        self._norms = [module for module in model.modules() if folds(module) and not isinstance(module, nn.SyncBatchNorm)]
        self._folded = {id(norm) for norm in self._norms}
        self._any = bool(names - self._caches)
        self._forwards = 0
        self.remember()

    def remember(self) -> None:
        """Take what the buffers hold now for what all ranks have."""
        self._base = [_statistics(norm) for norm in self._norms]
        self._counted = [_counted(norm) for norm in self._norms]
        self._before = {name: self._model.get_buffer(name).clone() for name in self._rules}
        self._marks = {name: (id(buffer), buffer._version) for name, buffer in self._watched().items()}
        self._forwards = 0

    def before_forward(self) -> None:
        """Notice, as long as no forward has changed anything, what the user has loaded into the buffers."""
        if not self._forwards:
            self.remember()
        self._forwards += 1

    def _watched(self) -> dict[str, Tensor]:
        folded = {
            f"{name}.{key}" if name else key
            for name, module in self._model.named_modules()
            if id(module) in self._folded
            for key, _ in module.named_buffers(recurse=False)
        }
        return {
            name: buffer
            for name, buffer in self._model.named_buffers()
            if name not in folded and name not in self._caches and name not in self._rules
        }

    @torch.no_grad()
    def exchange(self, ranks: Sequence[int]) -> None:
        """Leave equal buffers on every rank, from what the forwards of `ranks` have left. Collective.

        Raises:
            UsageError: ranks have changed a buffer in different ways, and no rule says how to merge it.
        """
        if not self._any:
            return
        if self._norms:
            self._fold(ranks)
        self._merge(ranks)
        self.remember()

    def _fold(self, ranks: Sequence[int]) -> None:
        device = self._base[0].device
        rows = [
            torch.cat([self._contribution(k, norm).flatten(), base.flatten(), base.new_tensor([self._calls(k, norm), counted])])
            for k, (norm, base, counted) in enumerate(zip(self._norms, self._base, self._counted, strict=True))
        ]
        gathered = self._transport.gather(torch.cat(rows).to(device))
        offset = 0
        for norm, base in zip(self._norms, self._base, strict=True):
            size = base.numel()
            pieces = [part[offset : offset + 2 * size + 2] for part in gathered]
            running, count = pieces[0][size : 2 * size].view_as(base), float(pieces[0][-1])
            for piece in (pieces[rank] for rank in ranks):
                moved, calls = piece[:size].view_as(base), float(piece[-2])
                if not calls:
                    continue
                if norm.momentum is None:
                    running = (count * running + calls * moved) / (count + calls)
                else:
                    running = (1 - norm.momentum) ** calls * running + moved
                count += calls
            # By way of .data, which does not count as a change: graphs that still wait for their backward do not read statistics.
            for name, value in zip(("running_mean", "running_var"), running, strict=True):
                getattr(norm, name).data.copy_(value)
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.data.fill_(count)
            offset += 2 * size + 2

    def _calls(self, k: int, norm: _BatchNorm) -> float:
        """Return how many forwards of this rank have moved the statistics of norm `k`."""
        if norm.num_batches_tracked is not None:
            return _counted(norm) - self._counted[k]
        return float(self._forwards) if norm.training else 0.0

    def _contribution(self, k: int, norm: _BatchNorm) -> Tensor:
        now, base, calls, counted = _statistics(norm), self._base[k], self._calls(k, norm), self._counted[k]
        if not calls:
            return torch.zeros_like(now)
        if norm.momentum is None:
            moved: Tensor = ((counted + calls) * now - counted * base) / calls
            return moved
        return now - float((1 - norm.momentum) ** calls) * base

    def _merge(self, ranks: Sequence[int]) -> None:
        now = self._watched()
        changed = {name: _hash(value) for name, value in now.items() if self._marks.get(name) != (id(value), value._version)}
        left = {name: self._model.get_buffer(name).cpu() for name in self._rules}
        heard: list[tuple[dict[str, str], dict[str, Tensor]]] = self._transport.gather_objects((changed, left))
        for name in sorted({name for rank in ranks for name in heard[rank][0]}):
            if len({heard[rank][0].get(name) for rank in ranks}) > 1:
                raise UsageError(
                    f"the forward changes the buffer {name!r}, and ranks have different values in it now; pass "
                    f"DistributedDataParallel(buffers={{{name!r}: RULE}}) with sum, mean, max, min, last, or a "
                    "function(before, values), or cache where each rank may keep its own"
                )
        for name, rule in self._rules.items():
            buffer = self._model.get_buffer(name)
            values = [heard[rank][1][name].to(buffer.device) for rank in ranks]
            buffer.data.copy_(merge(rule, self._before[name], values) if values else self._before[name])


def _statistics(norm: _BatchNorm) -> Tensor:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None, "only norms with statistics are folded"
    assert variance is not None, "only norms with statistics are folded"
    return torch.stack([mean.detach(), variance.detach()]).double()


def _counted(norm: _BatchNorm) -> float:
    return 0.0 if norm.num_batches_tracked is None else float(norm.num_batches_tracked)


def _hash(tensor: Tensor) -> str:
    data: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()
