"""`verify`: what is run, what is compared with what, and what the law allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.assembly import build_model
from paceline.data.contents import digest
from paceline.data.join import concatenate
from paceline.data.order import Position
from paceline.data.source import Source
from paceline.data.tree import map_leaves
from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.plan import Plan
from paceline.trainer import Trainer
from paceline.verify.compare import Comparison, compare
from paceline.verify.plain import NoMasks, plain_loop
from paceline.verify.records import StepRecord, record

ROUNDING = {"fp32": 1e-5}
"""Relative rounding that other orders of summation may leave in a gradient, for each precision; several times what was seen."""
PLAIN_ROUNDING = 1e-12


@dataclass(frozen=True)
class PlainCheck:
    """The one-worker run against the plain loop, in FP64 and without random masks.

    `pieces` says what the plain loop took: the `whole batch`, or its `micro-batches` where the model or the data makes rows
    depend on those beside them (BatchNorm, a random collate, a branch on the batch). `why_not` tells why it could not be made.
    """

    pieces: str
    comparison: Comparison | None
    why_not: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`."""

    plan: Plan
    exact: bool
    layouts: Comparison
    plain: PlainCheck

    @property
    def passed(self) -> bool:
        """Whether every difference is one that the law allows, and the plain loop could be compared."""
        plain = self.plain.comparison
        return self.layouts.violation is None and plain is not None and plain.violation is None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        plain = self.plain.comparison
        return {
            "plan": str(self.plan),
            "passed": self.passed,
            "promised": "identical" if self.exact else "rounding",
            "identical": self.layouts.identical,
            "layouts": _words(self.layouts),
            "plain": {"pieces": self.plain.pieces, "why_not": self.plain.why_not} | ({} if plain is None else _words(plain)),
        }


def _words(comparison: Comparison) -> dict[str, Any]:
    violation = comparison.violation
    return {
        "violation": None if violation is None else dataclasses.asdict(violation),
        "steps": [dataclasses.asdict(step) for step in comparison.steps],
    }


def verify(make_job: Callable[[], Job], plan: Plan | str, steps: int = 3, run: Sequence[StepRecord] | None = None) -> Verdict:
    """Return whether a job under a plan is the job on one worker, and whether that is the plain loop.

    Args:
        make_job: builds the job anew; it is called once for every run.
        plan: the plan to prove.
        steps: how many optimizer steps to compare, at least 1.
        run: the records of a run under the plan that was made elsewhere (by worker processes); None runs it here, on threads.

    Raises:
        UsageError: steps is below 1.
    """
    if steps < 1:
        raise UsageError(f"steps={steps} is not at least 1; there is nothing to compare")
    job = make_job()
    plan = Plan.of(plan)
    if run is None:
        with Trainer(job, plan) as trainer:
            plan = trainer.plan
            run = list(record(trainer, steps))
        job = make_job()
    plan = plan.settle(micro_batches=job.micro_batches)
    # Synchronised BatchNorm normalises over the global batch, which on one worker is one micro-batch.
    micro_batches = 1 if job.sync_batchnorm else plan.micro_batches
    alone = dataclasses.replace(plan, replicas=1, stages=1, micro_batches=micro_batches)
    with Trainer(job, alone) as trainer:
        reference = list(record(trainer, steps))
    exact = plan.reproducible and not job.sync_batchnorm
    layouts = compare(run, reference, 0.0 if exact else ROUNDING[plan.precision])
    return Verdict(plan, exact, layouts, check_plain(make_job, alone, steps))


def check_plain(make_job: Callable[[], Job], alone: Plan, steps: int) -> PlainCheck:
    """Return how the one-worker run compares with a plain loop over the same data, both in FP64 and without random masks."""
    job = _in_double(make_job())
    assert alone.micro_batches is not None
    pieces = "whole batch"
    whole, cut = (_batches(make_job(), steps, number) for number in (1, alone.micro_batches))
    if any(isinstance(module, _BatchNorm) and module.training for module in _modules(job)) or not _same_rows(whole, cut):
        pieces = "micro-batches"
    try:
        with NoMasks(), Trainer(_in_double(make_job()), alone, devices="cpu") as trainer:
            engine = list(record(trainer, steps))
        total_steps = trainer.total_steps or steps
        if pieces == "whole batch":
            comparison = compare(engine, _plain_records(job, whole, total_steps), PLAIN_ROUNDING)
            if comparison.violation is None or alone.micro_batches == 1:
                return PlainCheck(pieces, comparison)
            job = _in_double(make_job())  # do rows depend on each other? Then the micro-batches still come out alike
        return PlainCheck("micro-batches", compare(engine, _plain_records(job, cut, total_steps), PLAIN_ROUNDING))
    except PacelineError:
        raise
    except Exception as error:
        return PlainCheck(pieces, None, f"the job does not run in FP64 ({type(error).__name__}: {error})")


def _plain_records(job: Job, batches: list[list[Any]], total_steps: int) -> list[StepRecord]:
    wide = [[_wide(piece) for piece in batch] for batch in batches]
    with NoMasks():
        return list(plain_loop(job, _model(job), wide, total_steps))


def _model(job: Job) -> nn.Module:
    assert isinstance(job.model, nn.Module)
    return job.model


def _modules(job: Job) -> list[nn.Module]:
    return list(_model(job).modules())


def _in_double(job: Job) -> Job:
    """Return the job with its module built, in FP64, and its data's numbers widened as they are loaded."""
    model = build_model(job).double()
    losses = {name: _widening(loss) for name, loss in job.losses.items()}
    return dataclasses.replace(job, model=model, loss=losses if isinstance(job.loss, Mapping) else losses["loss"])


def _widening(loss: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, batch: loss(model, _wide(batch))


def _wide(batch: Any) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.double()
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            return leaf.astype(np.float64)
        return leaf

    return map_leaves(widen, batch)


def _batches(job: Job, steps: int, micro_batches: int) -> list[list[Any]]:
    """Return the first global batches of the job, each as its micro-batches."""
    source = Source(
        job.data, batch_size=job.batch_size, seed=job.seed, shuffle=job.shuffle, drop_last=job.drop_last,
        collate=job.collate, split=job.split,
    )  # fmt: skip
    taken: list[list[Any]] = []
    epoch = 0
    while len(taken) < steps:
        for local in source.batches(Position(epoch, 0), micro_batches=micro_batches, mine=range(micro_batches)):
            taken.append([local.micro_batches[i] for i in sorted(local.micro_batches)])
            if len(taken) == steps:
                break
        epoch += 1
    source.close()
    return taken


def _same_rows(whole: list[list[Any]], cut: list[list[Any]]) -> bool:
    """Return whether the micro-batches are just the slices of the whole batch, which a collate that pads or draws does not give."""
    try:
        return all(digest(concatenate(pieces)) == digest(concatenate(batch)) for batch, pieces in zip(whole, cut, strict=True))
    except UsageError:
        return False
