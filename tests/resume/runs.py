"""Runs that have something to forget: BatchNorm, dropout, augmentation, moments, a schedule. The command takes this file too."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from paceline import Job, Trainer

FEATURES, CLASSES, ROWS, BATCH = 6, 3, 47, 13  # 4 batches an epoch, the last one smaller
STEPS = 14


class Noisy(Dataset[tuple[Tensor, int]]):
    """Rows that are augmented from every generator there is."""

    def __init__(self, rows: int = ROWS) -> None:
        self.x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.randn(FEATURES) + random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, index % CLASSES


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, CLASSES),
    )


def loss(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def decaying(optimizer: torch.optim.Optimizer, total_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 - step / (total_steps + 1))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": model, "loss": loss, "optimizer": adamw, "scheduler": decaying, "data": Noisy(), "batch_size": BATCH,
        "steps": STEPS, "clip_norm": 1.0, "micro_batches": 4,
    }  # fmt: skip
    return Job(**values | changes)


def slow_loss(module: nn.Module, batch: Any) -> Tensor:
    time.sleep(0.01)  # so that there is something to interrupt
    return loss(module, batch)


def slow() -> Job:
    """What the command trains: the same numbers as `job(steps=40)`, taking a second or two."""
    return job(loss=slow_loss, steps=40)


def dull_loss(module: nn.Module, batch: Any) -> Tensor:
    time.sleep(1.0)
    return loss(module, batch)


def dull() -> Job:
    """Steps of some seconds."""
    return job(loss=dull_loss, steps=40)


def loading() -> Job:
    """The slow one, with loader processes."""
    return job(loss=slow_loss, steps=40, num_workers=2)


def judged() -> Job:
    """One that is evaluated."""
    return job(held_out=Noisy(20), metrics={"accuracy": accuracy})


@dataclass
class Ran:
    """What a run came to: the loss of every step, and what the module holds."""

    losses: list[float]
    state: dict[str, Tensor]


REPRODUCIBLE = "reproducible=true"


def plan(replicas: int) -> str:
    return f"replicas={replicas},{REPRODUCIBLE}"


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def uninterrupted(of: Job, replicas: int = 1, **options: Any) -> Ran:
    with Trainer(of, plan(replicas), timeout_s=20, **options) as trainer:
        losses = [trainer.step(batch).loss for batch in trainer.batches()]
        return Ran(losses, copied(trainer.model))


def take(trainer: Trainer, until: int, total: int = STEPS) -> list[float]:
    """Go on to a step, and return the losses on the way."""
    trainer.total_steps = total
    return [trainer.step(batch).loss for batch in trainer.batches(steps=until)]


def assert_same(state: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert state.keys() == reference.keys()
    assert [name for name, tensor in reference.items() if not torch.equal(state[name], tensor)] == []


FILE = str(Path(__file__).resolve())


def dropping_accuracy(best_step: int) -> Job:
    """A job whose metric is best at one step: it knows the step by how far the weights of a counting layer have come."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 0.25  # once for each of four micro-batches
            logits: Tensor = self.inner(x)
            return logits

    def steps_done(module: Counting, batch: Any) -> Tensor:
        return module.steps.expand(len(batch[0]))

    def closeness(steps: Tensor, labels: Tensor) -> float:
        return -abs(float(steps[0]) - best_step)

    return job(model=Counting, held_out=Noisy(20), predict=steps_done, metrics={"accuracy": closeness}, buffers={"steps": "sum"})
