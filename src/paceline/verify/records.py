"""What a run did, step by step and tensor by tensor, so that two runs can be laid side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import MismatchError
from paceline.trainer import Trainer
from paceline.worker.same_model import check_same_model

KINDS = ("gradient", "weight", "buffer")


@dataclass(frozen=True)
class StepRecord:
    """One step of a run: losses and learning rates by name, and tensors by kind and name (`gradient/head.weight`).

    `eps` is what the optimizer adds to the size of a gradient before it divides by it; 0 where it says none.
    """

    step: int
    losses: Mapping[str, float]
    lrs: Mapping[str, float]
    tensors: Mapping[str, Tensor]
    eps: float = 0.0

    def of_kind(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind, by the name that the module gives them."""
        return {name.removeprefix(f"{kind}/"): tensor for name, tensor in self.tensors.items() if name.startswith(f"{kind}/")}

    def save(self, folder: Path) -> None:
        """Write the record into a folder of records."""
        words = {
            "step": str(self.step),
            "losses": json.dumps(dict(self.losses)),
            "lrs": json.dumps(dict(self.lrs)),
            "eps": repr(self.eps),
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / f"{self.step:06}.safetensors", words)

    @classmethod
    def load_all(cls, folder: Path) -> list[StepRecord]:
        """Return all records of a folder, in order."""
        records = []
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                words = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            records.append(
                cls(int(words["step"]), json.loads(words["losses"]), json.loads(words["lrs"]), tensors, float(words["eps"]))
            )
        return records


def smallest_eps(optimizers: Iterable[Optimizer]) -> float:
    """Return the smallest `eps` of some optimizers, 0 where one has none."""
    return min((float(optimizer.defaults.get("eps") or 0.0) for optimizer in optimizers), default=0.0)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients, weights and buffers of a module."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().cpu().clone()
        if parameter.grad is not None:
            tensors[f"gradient/{name}"] = parameter.grad.detach().cpu().clone()
    for name, buffer in model.named_buffers():
        tensors[f"buffer/{name}"] = buffer.detach().cpu().clone()
    return tensors


def record(trainer: Trainer, steps: int) -> Iterator[StepRecord]:
    """Train for `steps` steps and yield what each did; also hold the workers against each other. Every rank calls it.

    Raises:
        MismatchError: after some step the workers no longer hold the same weights or buffers.
    """
    if trainer.total_steps is None:  # the learning rates of a real run, not of one that ends after a few steps
        trainer.total_steps = max(steps, trainer.job_steps or 0)
    for batch in trainer.batches(steps=steps):
        report = trainer.step(batch)
        yield StepRecord(
            report.step, dict(report.losses), dict(report.lrs), snapshot(trainer.model), smallest_eps(trainer.optimizers.values())
        )
        try:
            trainer.check_workers(check_same_model)
        except MismatchError as error:
            raise MismatchError(f"after step {report.step} the workers have drifted apart: {error}") from error


def first_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape; infinity where one has a NaN that the other has not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    wide_a, wide_b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    differences = torch.where(wide_a.isnan() & wide_b.isnan(), torch.zeros_like(wide_a), wide_a - wide_b).abs()
    return float("inf") if differences.isnan().any() else float(differences.max())
