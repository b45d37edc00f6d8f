"""The models, the batches and the optimizers that all contenders share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from paceline.jobs.gpt import ByteGPT

Batch = tuple[Tensor, Tensor]
NUM_BATCHES = 8
LR, WEIGHT_DECAY = 3e-4, 0.1
# A rate that single precision cannot tell from 0, but torch can: the same operators run as with a real one.
DROPS_NOTHING = 1e-12


@dataclass(frozen=True)
class Workload:
    """What is trained: `rows` is the global batch, `data(rows, generator)` makes inputs and targets, `dropout` goes to `model`.

    `normalises` says that a row's result depends on the other rows of its micro-batch (BatchNorm).
    """

    name: str
    words: str
    rows: int
    model: Callable[[float], nn.Module]
    data: Callable[[int, torch.Generator], Batch]
    dropout: float = 0.0
    clip_norm: float | None = None
    normalises: bool = False

    def build(self, seed: int, *, dropout: bool = True) -> nn.Module:
        """Return the module, with the same weights for the same seed; with `dropout=False` its random masks drop nothing."""
        torch.manual_seed(seed)
        return self.model(self.dropout if dropout else min(self.dropout, DROPS_NOTHING))

    def batches(self, seed: int) -> list[Batch]:
        """Return the global batches that all contenders go through again and again."""
        generator = torch.Generator().manual_seed(seed)
        return [self.data(self.rows, generator) for _ in range(NUM_BATCHES)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over all classified positions."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def optimizer(parameters: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]], *, fused: bool) -> Optimizer:
    """Return AdamW as torch sets it up by default, or fused."""
    return AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True if fused else None)


class Convolutions(nn.Module):
    """Images, float[rows, 3, side, side], to logits, float[rows, 10]: VGG in small, with BatchNorm."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, width in itertools.pairwise((3, *widths)):
            for entering in (channels, width):
                layers += [nn.Conv2d(entering, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.features(images).mean((2, 3)))
        return logits


def perceptron(widths: tuple[int, ...]) -> nn.Module:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for entering, leaving in itertools.pairwise(widths):
        layers += [nn.Linear(entering, leaving), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _vectors(size: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def make(rows: int, generator: torch.Generator) -> Batch:
        return torch.randn(rows, size, generator=generator), torch.randint(classes, (rows,), generator=generator)

    return make


def _bytes(length: int) -> Callable[[int, torch.Generator], Batch]:
    def make(rows: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(256, (rows, length + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return make


def _images(side: int) -> Callable[[int, torch.Generator], Batch]:
    def make(rows: int, generator: torch.Generator) -> Batch:
        return torch.randn(rows, 3, side, side, generator=generator), torch.randint(10, (rows,), generator=generator)

    return make


_ALL = (
    Workload(
        "mlp", "784 inputs, 6 hidden layers of 2048, 1000 classes", 128,
        lambda dropout: perceptron((784, *[2048] * 6, 1000)), _vectors(784, 1000),
    ),
    Workload(
        "gpt", "the built-in job `gpt`: width 256, 4 blocks, sequence 128, dropout 0.1, gradients clipped to norm 1", 8,
        lambda dropout: ByteGPT(dropout=dropout), _bytes(128), dropout=0.1, clip_norm=1.0,
    ),
    Workload(
        "gpt_10m", "the same with width 384, 6 blocks, 6 heads", 8,
        lambda dropout: ByteGPT(width=384, depth=6, heads=6, dropout=dropout), _bytes(128), dropout=0.1, clip_norm=1.0,
    ),
    Workload(
        "cnn", "8 convolutions with BatchNorm, 32 x 32 images", 16,
        lambda dropout: Convolutions((48, 96, 192, 320)), _images(32), normalises=True,
    ),
    Workload(
        "tiny", "a perceptron that tests run", 8,
        lambda dropout: perceptron((8, 16, 4)), _vectors(8, 4),
    ),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _ALL}
