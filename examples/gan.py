"""A GAN learns a ring of points: two named losses, each with its own optimizer, taken in turn within a step.

python examples/gan.py
"""

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from paceline import Job, Trainer

ROWS, LATENT = 2000, 8


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


class Gan(nn.Module):
    """One module holds both networks, so that every worker holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(LATENT, 2), mlp(2, 1)

    def fake(self, rows: int) -> torch.Tensor:
        # Drawn inside of a loss, so it comes from the micro-batch's own stream: the same numbers for any number of workers.
        return self.generator(torch.randn(rows, LATENT))


def critic_loss(model: Gan, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (real,) = batch
    on_real, on_fake = model.critic(real), model.critic(model.fake(len(real)).detach())
    return bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))


def generator_loss(model: Gan, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (real,) = batch
    on_fake = model.critic(model.fake(len(real)))
    return bce(on_fake, torch.ones_like(on_fake))


def adam(part: str, lr: float):  # a function of named parameters that takes those of one part
    return lambda named: torch.optim.Adam([p for name, p in named if name.startswith(part)], lr=lr, betas=(0.5, 0.9))


angles = torch.linspace(0, 2 * math.pi, ROWS)
ring = torch.stack([angles.cos(), angles.sin()], dim=1)

job = Job(
    model=Gan,
    loss={"critic": critic_loss, "generator": generator_loss},
    optimizer={"critic": adam("critic", 2e-3), "generator": adam("generator", 1e-3)},
    data=(ring,),
    batch_size=200,
    epochs=20,
)

with Trainer(job, "replicas=2") as trainer:
    report = trainer.fit()
    print(f"step {report.step}: critic {report.losses['critic']:.3f}, generator {report.losses['generator']:.3f}")
    with torch.no_grad():
        radius = trainer.model.fake(1000).norm(dim=1)
    print(f"radius of generated points: {radius.mean():.2f} +- {radius.std():.2f}, of the ring: 1.00")
