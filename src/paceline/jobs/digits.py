"""Job `digits`: a convolutional net with BatchNorm and dropout on the UCI handwritten digits that come with the package."""

from __future__ import annotations

import importlib.resources
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from paceline.job import Job, Named

HELD_OUT_SHARE = 0.2
SPLIT_SEED = 0
LR = 0.05


class Digits(Dataset[tuple[Tensor, int]]):
    """Images, float[1, 8, 8] in 0..1, with their digits; `augment` moves each image by a pixel or not at all.

    Args:
        images: uint8[n, 8, 8] in 0..16.
        labels: uint8[n] in 0..9.
        augment: draw a shift for each image, from torch's random stream.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool = False) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].float()[None] / 16
        if self.augment:
            # Along one axis only: the digits fill their 8 x 8 pixels, and two cut edges make them hard to tell apart.
            axis, start = int(torch.randint(0, 2, ())), int(torch.randint(0, 3, ()))
            image = F.pad(image, (1, 1, 0, 0) if axis else (0, 0, 1, 1)).narrow(1 + axis, start, 8)
        return image, int(self.labels[index])


def load() -> tuple[Digits, Digits]:
    """Return (training, held-out) images; the split is the same everywhere and keeps the share of each digit."""
    path = importlib.resources.files("paceline.jobs") / "digits.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images, labels = torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"])
    order = torch.from_numpy(np.random.default_rng(SPLIT_SEED).permutation(len(labels)))
    held_out: list[int] = []
    for digit in range(10):
        of_digit = order[labels[order] == digit]
        held_out.extend(of_digit[: round(len(of_digit) * HELD_OUT_SHARE)].tolist())
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[held_out] = True
    return Digits(images[~is_held_out], labels[~is_held_out], augment=True), Digits(images[is_held_out], labels[is_held_out])


class ConvNet(nn.Module):
    """Images, float[rows, 1, 8, 8], to logits, float[rows, 10]."""

    def __init__(self, width: int = 32, dropout: float = 0.25) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, width),
            *_convolution(width, width),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width),
            *_convolution(2 * width, 2 * width),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(2 * width * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.dropout(self.features(images).flatten(1)))
        return logits


def _convolution(channels: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of images whose likeliest digit is right."""
    return float((logits.argmax(dim=1) == labels).float().mean())


def optimizer(named: Named) -> Optimizer:
    """Return SGD with Nesterov momentum."""
    return SGD(named, lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)


def scheduler(of: Optimizer, total_steps: int) -> LambdaLR:
    """Return a linear warm-up over the first tenth, then a cosine down to nearly nothing."""
    warmup = max(1, total_steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.001 + 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total_steps - warmup))))

    return LambdaLR(of, factor)


def job() -> Job:
    """Return the job: well under a minute on one core; 64 rows leave 8 to each of up to 8 micro-batches."""
    train, held_out = load()
    return Job(
        name="digits",
        model=ConvNet,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        data=train,
        held_out=held_out,
        metrics={"accuracy": accuracy},
        batch_size=64,
        drop_last=True,
        epochs=20,
    )
