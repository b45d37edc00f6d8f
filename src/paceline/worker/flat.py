"""Gradients side by side in one flat tensor, as a transport wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

BOUNDARY_BYTES = 64


class FlatLayout:
    """Where the gradients of some parameters of one dtype and device lie in a flat tensor.

    Each starts at a 64-byte boundary and keeps its parameter's strides. Behind them stands one flag for each: 1 where there is a
    gradient, so that a sum over workers also tells which parameters were used anywhere.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        boundary = max(1, BOUNDARY_BYTES // self.dtype.itemsize)
        self._dense = [_is_dense(parameter) for parameter in self.parameters]
        self._offsets, offset = [], 0
        for parameter in self.parameters:
            self._offsets.append(offset)
            offset += -(-parameter.numel() // boundary) * boundary
        self._flags_offset = offset
        self.size = offset + len(self.parameters)

    def new(self) -> Tensor:
        """Return a flat tensor of zeros, no flag set."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of `flat` that is each parameter's, in its shape."""
        return [
            flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset() + offset)
            if dense
            else flat[offset : offset + parameter.numel()].view(parameter.size())
            for parameter, offset, dense in zip(self.parameters, self._offsets, self._dense, strict=True)
        ]

    def flags(self, flat: Tensor) -> Tensor:
        """Return the part of `flat` that holds the flags."""
        return flat[self._flags_offset :]


def _is_dense(parameter: nn.Parameter) -> bool:
    """Return whether the parameter fills its memory without gaps or overlaps, in whatever order of dimensions."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def buckets_of(parameters: Iterable[nn.Parameter], bucket_bytes: int | None = None) -> list[list[nn.Parameter]]:
    """Return the parameters in their order, cut where dtype or device change hands or `bucket_bytes` are full."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    buckets: list[list[nn.Parameter]] = []
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        size = parameter.numel() * parameter.element_size()
        if kind not in open_buckets or (bucket_bytes is not None and filled[kind] + size > bucket_bytes):
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(parameter)
        filled[kind] += size
    return buckets
