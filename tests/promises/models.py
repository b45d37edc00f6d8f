"""Small models, data and jobs that the promises are tested on, and the one way in which they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import Job, Trainer

FEATURES, CLASSES = 6, 3


def features(rows: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed))


def classes(rows: int, seed: int = 2) -> Tensor:
    return torch.randint(0, CLASSES, (rows,), generator=torch.Generator().manual_seed(seed))


def dataset(rows: int, seed: int = 1) -> TensorDataset:
    return TensorDataset(features(rows, seed), classes(rows, seed + 1))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, CLASSES))


def batchnorm(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, CLASSES))


class Tied(nn.Module):
    """Encoder and decoder share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(FEATURES, FEATURES)
        self.decoder = nn.Linear(FEATURES, FEATURES)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(torch.tanh(self.encoder(x))))


class Unused(nn.Module):
    """One layer is never called, and one only for batches whose first feature adds up to more than 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.never, self.sometimes = (nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output = self.used(x)
        return output + self.sometimes(x) if x[:, 0].sum() > 0 else output


class Everything(nn.Module):
    """Tied weights, BatchNorm, dropout, and a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied, self.norm, self.unused = Tied(), nn.BatchNorm1d(CLASSES), nn.Linear(2, 2)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.tied(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "dropout": dropout, "batchnorm": batchnorm, "tied": Tied, "unused": Unused, "everything": Everything,
}  # fmt: skip


def job(model: Callable[[], nn.Module] | nn.Module = mlp, **changes: Any) -> Job:
    """A job over 26 samples in batches of 13, with what `changes` say otherwise."""
    values: dict[str, Any] = {"loss": cross_entropy, "optimizer": sgd, "data": dataset(26), "batch_size": 13}
    built = model if isinstance(model, nn.Module) else model()
    return Job(model=built, **{**values, **changes})


@dataclass
class Ran:
    """What a run came to."""

    losses: list[float]
    state: dict[str, Tensor]
    norms: list[float | None] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


def run(job: Job, plan: str, steps: int = 3, **options: Any) -> Ran:
    """Train for `steps` steps under a plan; no wait may take longer than 20 seconds."""
    with Trainer(job, plan, **{"timeout_s": 20.0, **options}) as trainer:
        reports = [trainer.step(batch) for batch in trainer.batches(steps=steps)]
        return Ran(
            [report.loss for report in reports],
            {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()},
            [report.grad_norm for report in reports],
            [report.lr for report in reports],
            [dict(report.metrics) for report in reports],
        )


def assert_identical(ran: Ran, reference: Ran) -> None:
    """The same bits in every loss, norm and tensor."""
    assert ran.losses == reference.losses
    assert ran.norms == reference.norms
    assert ran.lrs == reference.lrs
    assert ran.state.keys() == reference.state.keys()
    differing = [name for name, tensor in reference.state.items() if not torch.equal(ran.state[name], tensor)]
    assert differing == []


def assert_close(ran: Ran, reference: Ran, tolerance: float = 2e-5) -> None:
    """Equal but for rounding."""
    torch.testing.assert_close(torch.tensor(ran.losses), torch.tensor(reference.losses), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ran.state, reference.state, rtol=tolerance, atol=tolerance)


def whole_batch_step(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, optimizer: torch.optim.Optimizer
) -> float:
    """Take one step as a plain loop does, and return the loss."""
    optimizer.zero_grad()
    value = loss(model, batch)
    torch.autograd.backward(value)
    optimizer.step()
    return float(value.detach())
