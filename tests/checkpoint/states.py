"""Small runs, their states, and what it means that two values are the same to the last bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint import State, optimizer_state


class Tied(nn.Module):
    """Two names for one weight, a buffer, a frozen layer, a layer that no loss reaches, BatchNorm's counters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        y: Tensor = self.head(torch.tanh(self.frozen(self.norm(self.embed(x)))))
        return y


def train(model: nn.Module, optimizer: Optimizer, steps: range, scheduler: Any = None) -> None:
    """Take steps on batches that depend on their number alone."""
    width = next(model.parameters()).shape[-1]
    dtype = next(model.parameters()).dtype
    for step in steps:
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step)).to(dtype)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) - x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        if scheduler is not None:
            scheduler.step()


def a_state(step: int = 3, width: int = 8, make: Callable[..., Optimizer] = torch.optim.AdamW) -> State:
    """Return the state of a run after some steps."""
    torch.manual_seed(step)
    model = Tied(width)
    optimizer = make(model.parameters(), lr=0.01)
    train(model, optimizer, range(step))
    return State(
        weights=model.state_dict(),
        optimizers={"loss": optimizer_state(optimizer, model.named_parameters())},
        schedulers={"loss": {"last_epoch": step, "base_lrs": [0.01]}},
        progress={"steps_done": step, "epoch": 1, "best": float("inf"), "total_steps": None},
        random={"torch": torch.get_rng_state(), "python": (3, (1, 2, 2**40), None)},
        objects={"ema": {"shadow": {"w": torch.full((3,), float(step))}}},
        facts={"plan": "replicas=2", "seed": 0},
    )


def same(a: Any, b: Any) -> bool:
    """Return whether two values are of one type and equal to the last bit."""
    if type(a) is not type(b) and not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    if isinstance(a, Tensor):
        flat = [tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float | complex):
        return np.complex128(a).tobytes() == np.complex128(b).tobytes()
    if isinstance(a, dict):
        return getattr(a, "default_factory", None) is getattr(b, "default_factory", None) and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
