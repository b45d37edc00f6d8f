"""Two runs side by side: bit-identical, equal to rounding, or different - and then where first, and why that may be.

What rounding can do is bounded per element. A gradient may be off by `noise` times the size of its tensor (with a floor from the
largest gradient of all, since a gradient that is zero but for rounding has no size of its own). A weight may be off by what such
a gradient can make of an update: an optimizer that divides by the gradient's size (Adam) turns the rounding noise of a gradient
near zero into a whole step of the learning rate, and for all others scales the error with the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.verify.records import KINDS, StepRecord, first_difference

FLOOR = 0.2  # a tensor's rounding noise is at least this part of that of the tensor with the largest gradient


@dataclass(frozen=True)
class Difference:
    """The first tensor that differs more than allowed."""

    step: int
    kind: str
    name: str
    largest: float
    cause: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} {self.name}: off by {self.largest:.3g}; likely cause: {self.cause}"


@dataclass(frozen=True)
class StepComparison:
    """How far two runs are apart in one step: the largest absolute difference by kind, and the tensors that differ at all."""

    step: int
    losses: tuple[float, float]
    largest: dict[str, float]
    differing: dict[str, int]
    tensors: dict[str, int]


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side; `violation` is the first difference that is not allowed."""

    steps: list[StepComparison] = field(default_factory=list)
    violation: Difference | None = None

    @property
    def identical(self) -> bool:
        """Whether all losses and tensors have the same bits."""
        return all(step.losses[0] == step.losses[1] and not any(step.differing.values()) for step in self.steps)


def compare(run: Sequence[StepRecord], reference: Sequence[StepRecord], noise: float) -> Comparison:
    """Return how a run differs from the reference; `noise` is the relative rounding allowed, 0 asks for the same bits."""
    steps: list[StepComparison] = []
    violation = None
    if len(run) != len(reference):
        cause = f"{len(run)} and {len(reference)} steps were taken"
        violation = Difference(min(len(run), len(reference)) + 1, "step", "count", math.inf, cause)
    slack: dict[str, Tensor] = {}
    for ours, theirs in zip(run, reference, strict=False):
        steps.append(_compare_step(ours, theirs))
        if violation is None:
            violation = _find_violation(ours, theirs, noise, slack)
    return Comparison(steps, violation)


def _compare_step(ours: StepRecord, theirs: StepRecord) -> StepComparison:
    largest, differing, counts = {}, {}, {}
    for kind in KINDS:
        mine, reference = ours.of_kind(kind), theirs.of_kind(kind)
        distances = [first_difference(mine[name], reference[name]) for name in mine.keys() & reference.keys()]
        distances += [math.inf] * len(mine.keys() ^ reference.keys())
        largest[kind] = max(distances, default=0.0)
        differing[kind] = sum(distance > 0 for distance in distances)
        counts[kind] = len(distances)
    return StepComparison(ours.step, (sum(ours.losses.values()), sum(theirs.losses.values())), largest, differing, counts)


def _find_violation(ours: StepRecord, theirs: StepRecord, noise: float, slack: dict[str, Tensor]) -> Difference | None:
    growth = 4.0 ** (theirs.step - 1)  # rounding of one step is the starting point of the next
    allowed = noise * growth
    for name, loss in theirs.losses.items():
        distance = abs(ours.losses.get(name, math.nan) - loss)
        if not distance <= 10 * allowed * max(abs(loss), 1e-3):
            return Difference(ours.step, "loss", name, distance, _cause_of_loss(theirs.step))
    gradients = theirs.of_kind("gradient")
    size_of_all = max((float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0)
    for kind in KINDS:
        mine, reference = ours.of_kind(kind), theirs.of_kind(kind)
        for name in [*reference, *(mine.keys() - reference.keys())]:
            if name not in mine or name not in reference:
                which = "the plan" if name in mine else "one worker"
                return Difference(ours.step, kind, name, math.inf, f"only {which} has it: a parameter is used in one of them only")
            bound = _bound(kind, name, theirs, allowed, size_of_all, slack)
            if not _within(mine[name], reference[name], bound):
                cause = _cause(kind, name, ours, theirs)
                return Difference(ours.step, kind, name, first_difference(mine[name], reference[name]), cause)
    return None


def _bound(
    kind: str, name: str, theirs: StepRecord, allowed: float, size_of_all: float, slack: dict[str, Tensor]
) -> Tensor | float:
    """Return how far each element may be off by rounding."""
    tensor = theirs.of_kind(kind)[name]
    if not tensor.numel() or not tensor.dtype.is_floating_point or not allowed:
        return 0.0
    size = float(tensor.double().abs().max())
    if kind == "gradient":
        return allowed * max(size, FLOOR * size_of_all)
    if kind == "weight":
        gradient = theirs.tensors.get(f"gradient/{name}")
        if gradient is not None:
            error = allowed * max(float(gradient.double().abs().max()), FLOOR * size_of_all)
            lr = max(theirs.lrs.values(), default=0.0)
            wide = gradient.double().abs() + theirs.eps
            step = lr * (2 * error + (4 * error / (wide + 1e-300)).clamp(max=2.0))
            slack[name] = slack.get(name, torch.zeros_like(step)) + step
        return slack.get(name, 0.0) + allowed * size
    # A weight that wanders (a bias before BatchNorm) takes the statistics of what it is added to along.
    wander = max((float(far.max()) for far in slack.values() if far.numel()), default=0.0)
    return allowed * max(size, 1e-3) + wander


def _within(a: Tensor, b: Tensor, bound: Tensor | float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    if not a.dtype.is_floating_point:
        return False
    wide_a, wide_b = a.double(), b.double()
    fits = ((wide_a - wide_b).abs() <= bound) | (wide_a.isnan() & wide_b.isnan()) | (wide_a == wide_b)
    return bool(fits.all())


def _cause_of_loss(step: int) -> str:
    if step > 1:
        return "the update of the step before"
    return "other data, other random masks, or a forward that depends on the worker (its rank, thread or clock)"


def _cause(kind: str, name: str, ours: StepRecord, theirs: StepRecord) -> str:
    a, b = ours.of_kind(kind)[name], theirs.of_kind(kind)[name]
    if kind == "gradient":
        factor = _factor(a, b)
        if factor is not None:
            return f"gradients are {factor:.4g} times what they should be: losses are weighted otherwise"
        return "a backward that depends on the worker, or a sum that leaves some worker's part out"
    if kind == "weight":
        if dict(ours.lrs) != dict(theirs.lrs):
            return f"another learning rate ({dict(ours.lrs)} and {dict(theirs.lrs)}): the scheduler"
        return "the optimizer's update: its state, the clipping norm, or a weight that no worker owns"
    return "the order in which the micro-batches' changes of the buffer are merged"


def _factor(a: Tensor, b: Tensor) -> float | None:
    """Return c where a is c times b but for rounding, and c is not 1."""
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    norm = float(wide_b @ wide_b) if wide_b.numel() else 0.0
    if not norm or not math.isfinite(norm):
        return None
    factor = float(wide_a @ wide_b) / norm
    if abs(factor - 1) < 1e-3 or float((wide_a - factor * wide_b).norm()) > 1e-3 * float(wide_a.norm() + 1e-300):
        return None
    return factor
