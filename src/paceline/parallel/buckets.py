"""One bucket of gradients: a flat tensor that leaves when all of its parameters' gradients have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.transport.base import Transport, Work
from paceline.worker.flat import FlatLayout


class Bucket:
    """The gradients of some parameters side by side; while they are on their way, `grad` of each is a view of the flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = FlatLayout(parameters)
        self.parameters = self.layout.parameters
        self._flat = self.layout.new()
        self._views: list[Tensor] = []
        self.arrived: list[bool] = []
        self.missing = 0
        self.work: Work | None = None

    def begin(self) -> None:
        """Get ready for a backward. What the program still holds of earlier gradients is left to it."""
        storage = self._flat.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        held_by_grads = sum(1 for p in self.parameters if p.grad is not None and start <= p.grad.data_ptr() < end)
        self._views = []
        # One use each: the flat tensor and the storage object here.
        if torch._C._storage_Use_Count(storage._cdata) - 2 > held_by_grads:
            self._flat = self.layout.new()
        self._views = self.layout.views(self._flat)
        self.arrived = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.work = None

    def take(self, k: int, name: str) -> None:
        """Move a parameter's gradient, with all that it has accumulated, into the flat tensor."""
        self._move(k, name)
        if not self.arrived[k]:
            self.arrived[k] = True
            self.missing -= 1

    def _move(self, k: int, name: str) -> None:
        parameter, view = self.parameters[k], self._views[k]
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.layout != torch.strided:
            raise UsageError(
                f"the gradient of {name!r} is {gradient.layout}, and ranks average dense gradients; "
                "build the module with sparse=False"
            )
        elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
            parameter.grad = view

    def send(self, transport: Transport, dirty: set[int], names: Sequence[str], *, active: bool, label: str) -> None:
        """Start the sum over ranks. A gradient that did not arrive goes along with what it has accumulated."""
        if not active:
            self._flat.zero_()
        else:
            for k, arrived in enumerate(self.arrived):
                if not arrived:
                    self._move(k, names[k])
            has_news = [
                arrived or (id(p) in dirty and p.grad is not None) for arrived, p in zip(self.arrived, self.parameters, strict=True)
            ]
            flags = self.layout.flags(self._flat)
            if all(has_news):
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(has_news, dtype=flags.dtype))
        if self._flat.dtype == torch.float16:  # a sum of many ranks would leave its range before it is divided
            self._flat.div_(transport.size)
        self.work = transport.sum_(self._flat, [self._flat], label=label)

    def finish(self, divisor: float, size: int) -> None:
        """Wait for the sum, and let `grad` of every parameter that any rank has used be its share of it."""
        assert self.work is not None, "a bucket is finished once it has been sent"
        self.work.wait()
        self._flat.div_(divisor / size if self._flat.dtype == torch.float16 else divisor)
        if not all(self.arrived):  # reading the flags would wait for a GPU
            used = [abs(flag) > 0 for flag in self.layout.flags(self._flat).tolist()]
        else:
            used = self.arrived
        for parameter, view, is_used in zip(self.parameters, self._views, used, strict=True):
            if is_used:
                parameter.grad = view
        self._views = []
