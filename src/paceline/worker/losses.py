"""What a job's loss function returned, read once: a value to differentiate, what it is a mean of, and what to report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError

ALLOWED = "a mean, (sum, count), (mean, extras) or (sum, count, extras), with tensors of one element"


@dataclass(frozen=True)
class LossValue:
    """A micro-batch's loss: `value` is a mean over `count`, or a sum where `is_sum`; `by_rows` says that the count is the rows."""

    value: Tensor
    count: float | Tensor
    is_sum: bool
    by_rows: bool
    extras: dict[str, float | Tensor] = field(default_factory=dict)

    @classmethod
    def read(cls, result: Any, rows: int, count: float | None, name: str = "loss") -> LossValue:
        """Return the loss that a function returned for `rows` rows, with `count` from the job's count function where it has one.

        Raises:
            UsageError: the result is none of the allowed forms.
        """
        extras: dict[str, float | Tensor] = {}
        returned_count = None
        value = result
        if isinstance(result, tuple):
            value, *rest = result if result else (None,)
            if rest and isinstance(rest[-1], Mapping):
                extras = {str(key): extra for key, extra in rest.pop().items()}
            if rest:
                returned_count = rest.pop()
            if rest or not isinstance(returned_count, int | float | Tensor | None):
                raise UsageError(f"{name} returned {_word(result)}; return {ALLOWED}")
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(f"{name} returned {_word(result)}; return {ALLOWED}")
        for key, extra in extras.items():
            if not isinstance(extra, int | float) and not (isinstance(extra, Tensor) and extra.numel() == 1):
                raise UsageError(f"{name} returned the extra {key!r} as {_word(extra)}; extras are scalars, metrics take the rest")
        if returned_count is not None:
            if count is not None:
                raise UsageError(f"{name} returned a sum with its count, and the job has count= too; leave one of them out")
            return cls(value, _detached(returned_count), True, False, extras)
        if count is not None:
            return cls(value, count, False, False, extras)
        return cls(value, rows, False, True, extras)

    @property
    def total(self) -> Tensor:
        """The sum that the loss stands for, in double precision, without its graph."""
        value = self.value.detach().double().reshape(())
        if self.is_sum:
            return value
        return value * self.count if isinstance(self.count, Tensor) or self.count else torch.zeros_like(value)

    def numbers(self) -> Tensor:
        """Return (total, count, extras times count ...) in double precision, the extras in the order of their names."""
        device = self.value.device
        count = torch.as_tensor(self.count, dtype=torch.float64, device=device).reshape(())
        extras = [torch.as_tensor(value, device=device).detach().double().reshape(()) for _, value in sorted(self.extras.items())]
        # What was averaged over nothing is not a number, and has no part.
        weighed = [torch.where(count == 0, torch.zeros_like(extra), extra * count) for extra in extras]
        return torch.stack([self.total, count, *weighed])


def _detached(count: float | Tensor) -> float | Tensor:
    return count.detach().double().reshape(()) if isinstance(count, Tensor) else count


def _word(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_word(part) for part in value)})"
    return f"{type(value).__name__}"
