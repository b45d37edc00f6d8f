"""BatchNorm over the whole global batch: each replica holds one micro-batch, and statistics are of all of them together.

Ioffe and Szegedy 2015 define the statistics over the mini-batch; with the mini-batch on several workers its sums travel,
in the forward (counts, means, squared distances) and in the backward (the two sums that the input's gradient needs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.errors import UsageError
from paceline.transport.base import Transport


class SyncBatchNormMode(TorchFunctionMode):
    """While it is active, every batch_norm that uses batch statistics takes them over all ranks. Every rank must be in it."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self._transport = transport

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        normalise: Callable[..., tuple[Tensor, Tensor, Tensor, float]] = _GlobalNorm.apply
        output, mean, variance, count = normalise(input, eps, self._transport)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * count / (count - 1)).to(running_var.dtype), momentum)
        shape = [1, -1] + [1] * (input.dim() - 2)
        output = output if weight is None else output * weight.view(shape)
        return output if bias is None else output + bias.view(shape)


class _GlobalNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over all ranks' x; also returns the statistics and the count, in double precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, transport: Transport) -> tuple[Tensor, Tensor, Tensor, float]:
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.double()
        local_count = wide.numel() // wide.size(1)
        local_mean = wide.mean(dims) if local_count else wide.new_zeros(wide.size(1))
        local_squares = (wide - _wide(local_mean, x)).square().sum(dims)
        packed = torch.cat([local_mean.new_tensor([local_count]), local_mean, local_squares])
        stacked = torch.stack(transport.gather(packed))
        counts, (means, squares) = stacked[:, :1], stacked[:, 1:].chunk(2, dim=1)
        count = float(counts.sum())
        if count < 2:
            raise UsageError(f"BatchNorm needs 2 or more values per channel of the global batch, got {count:.0f}; enlarge it")
        mean = (counts * means).sum(0) / count
        # Chan, Golub and LeVeque 1983: squared distances of parts joined through the distances of their means.
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        inverse = (variance + eps).rsqrt()
        output = ((wide - _wide(mean, x)) * _wide(inverse, x)).to(x.dtype)
        ctx.save_for_backward(x, mean, inverse)
        ctx.transport, ctx.count, ctx.dims = transport, count, dims
        ctx.mark_non_differentiable(mean, variance)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, mean, inverse = ctx.saved_tensors
        gradient = grads[0].double()
        normal = (x.double() - _wide(mean, x)) * _wide(inverse, x)
        packed = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        total = torch.stack(ctx.transport.gather(packed)).sum(0) / ctx.count
        result = (gradient - _wide(total[0], x) - normal * _wide(total[1], x)) * _wide(inverse, x)
        return result.to(x.dtype), None, None


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view([1, -1] + [1] * (like.dim() - 2))
