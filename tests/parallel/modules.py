"""Small modules that wrappers are tried on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


def x_of(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, 2))


def batchnorm(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 2))


class Tied(nn.Module):
    """One weight is used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Listed(nn.Module):
    """Parameters in a list and in a dictionary, and code that asks for the first parameter's device and dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        assert len(list(self.parameters())) == 3
        x = x.to(first.device, first.dtype)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.named["bias"]


class Branches(nn.Module):
    """One layer is always used, one where the caller says so, one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(WIDTH, 2) for _ in range(3))

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        return self.always(x) + self.sometimes(x) if branch else self.always(x)


MODULES: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "tied": Tied, "listed": Listed, "branches": Branches}


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    module = make()
    return module, copy.deepcopy(module)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def assert_same(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
