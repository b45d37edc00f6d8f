"""`verify` passes what is right, and names the tensor and the step of what is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Job, UsageError, count_valid
from paceline.verify import verify
from paceline.worker.objective import Objective
from paceline.worker.worker import Worker
from tests.promises.models import (
    MODELS,
    adamw,
    batchnorm,
    classes,
    cross_entropy,
    dataset,
    dropout,
    features,
    job,
    mlp,
    sgd,
)
from tests.promises.test_schedulers_and_objectives import gan

EXACT = "replicas=2,micro_batches=4,reproducible=true"


def ignoring() -> Job:
    labels = classes(26)
    labels[::3] = -100
    return job(data=torch.utils.data.TensorDataset(features(26), labels), count=count_valid("1"))


def scheduled() -> Job:
    return job(
        clip_norm=0.05, optimizer=adamw, scheduler=lambda o, total_steps: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps)
    )


RIGHT: dict[str, Callable[[], Job]] = {
    # (`unused` takes a branch by the sum of its batch: cut into micro-batches it is another model.)
    **{name: (lambda make=make: job(make)) for name, make in MODELS.items() if name != "unused"},
    "AdamW": lambda: job(MODELS["everything"], optimizer=adamw),
    "ignored labels": ignoring,
    "clipping and a schedule": scheduled,
    "two losses": gan,
    "synchronised BatchNorm": lambda: job(batchnorm, sync_batchnorm=True),
}


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "synchronised BatchNorm"])
def test_a_right_job_is_bit_identical_in_reproducible_mode(name: str) -> None:
    verdict = verify(RIGHT[name], EXACT)
    assert verdict.exact
    assert verdict.layouts.identical
    assert verdict.passed, verdict.as_dict()
    assert [step.step for step in verdict.layouts.steps] == [1, 2, 3]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("replicas", [2, 4])
def test_rounding_passes_over_five_steps(name: str, replicas: int) -> None:
    pieces = replicas if name == "synchronised BatchNorm" else 5
    verdict = verify(RIGHT[name], f"replicas={replicas},micro_batches={pieces}", steps=5)
    assert not verdict.exact
    assert verdict.passed, (verdict.layouts.violation, verdict.plain)


def test_a_job_with_batchnorm_is_held_against_its_micro_batches() -> None:
    assert verify(RIGHT["batchnorm"], EXACT).plain.pieces == "micro-batches"
    assert verify(RIGHT["mlp"], EXACT).plain.pieces == "whole batch"


def test_no_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="steps=0 is not at least 1; there is nothing to compare"):
        verify(RIGHT["mlp"], EXACT, steps=0)


def on_second_worker() -> bool:
    return threading.current_thread().name == "paceline-1"


@pytest.mark.parametrize("mode", ["", ",reproducible=true"])
def test_a_loss_that_depends_on_the_worker_is_found(mode: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (1.001 if on_second_worker() else 1.0)

    verdict = verify(lambda: job(loss=loss), f"replicas=2,micro_batches=4{mode}")
    assert not verdict.passed
    violation = verdict.layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "loss", "loss")
    assert "depends on the worker" in violation.cause


class Scaling(torch.autograd.Function):
    """Passes its input on, and scales the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.factor, None


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("mode", ["", ",reproducible=true"])
def test_a_gradient_that_one_worker_scales_is_found_by_name(mode: str, optimizer: Any) -> None:
    def make() -> Job:
        def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return Scaling.apply(output, 1.01 if on_second_worker() else 1.0)

        model = mlp()
        model[0].register_forward_hook(scale)
        return job(model, optimizer=optimizer)

    verdict = verify(make, f"replicas=2,micro_batches=4{mode}")
    violation = verdict.layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "gradient", "0.weight")


def test_a_gradient_that_every_worker_scales_is_named_by_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of the plan weigh each gradient by their number, as an engine that forgets to divide would."""
    update = Objective.update

    def forgetting(self: Objective, factor: Any, clip_norm: Any) -> Any:
        return update(self, factor * (2.0 if threading.active_count() > before else 1.0), clip_norm)

    before = threading.active_count()
    monkeypatch.setattr(Objective, "update", forgetting)
    violation = verify(lambda: job(), "replicas=2,micro_batches=4").layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "gradient", "0.weight")
    assert "gradients are 2 times what they should be" in violation.cause


def test_a_buffer_that_differs_is_found_by_name() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = mlp()
            self.register_buffer("kept", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.kept.fill_(2.0 if on_second_worker() else 1.0)
            return self.base(x)

    violation = verify(lambda: job(Counting, buffers={"kept": "last"}), EXACT).layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name, violation.largest) == (1, "buffer", "kept", 1.0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_a_parameter_that_the_optimizer_skips_in_one_run_is_found_by_name(name: str, optimizer: Any, seed: int) -> None:
    """The bound for rounding is not so loose that an update that is missing fits in."""

    kind, lr = (torch.optim.SGD, 0.1) if optimizer is sgd else (torch.optim.AdamW, 1e-2)

    def skipping(skips: bool) -> Any:
        def make(named: Any) -> torch.optim.Optimizer:
            kept, left_out = [(n, p) for n, p in named if n != name], [(n, p) for n, p in named if n == name]
            return kind([{"params": kept}, {"params": left_out, "lr": 0.0 if skips else lr}], lr=lr)

        return make

    made = iter([True, False, False, False, False, False, False])

    def job_of() -> Job:
        model = mlp()
        torch.manual_seed(100 + seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
        return job(model, optimizer=skipping(next(made)), data=dataset(26, seed=10 * seed + 1))

    violation = verify(job_of, "replicas=2,micro_batches=4").layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "weight", name)
    assert "the optimizer's update" in violation.cause


def test_an_optimizer_that_skips_a_step_on_threads_is_found() -> None:
    class Skipping(torch.optim.SGD):
        taken = 0

        def step(self, closure: Any = None) -> Any:
            self.taken += 1
            if self.taken == 2 and threading.current_thread().name.startswith("paceline"):
                return None
            return super().step(closure)

    violation = verify(lambda: job(optimizer=lambda n: Skipping(n, lr=0.1)), "replicas=2,micro_batches=4").layouts.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (2, "weight", "0.weight")


def test_a_mistake_that_all_layouts_share_is_found_by_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout weighs the first micro-batch a little more: they agree with each other, and are wrong."""
    backward = Worker._backward

    def weighing(self: Worker, objective: Any, value: Any, share: Any, i: int, **more: Any) -> None:
        if i == 0:
            value.value.register_hook(lambda gradient: gradient * (1 + 1e-6))
        backward(self, objective, value, share, i, **more)

    monkeypatch.setattr(Worker, "_backward", weighing)
    verdict = verify(lambda: job(), EXACT)
    assert verdict.layouts.identical
    assert not verdict.passed
    assert verdict.plain.comparison is not None
    violation = verdict.plain.comparison.violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "gradient", "0.weight")


def test_clipping_that_all_layouts_forget_is_found_by_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Objective.update
    monkeypatch.setattr(Objective, "update", lambda self, factor, clip_norm: update(self, factor, None))
    verdict = verify(lambda: job(clip_norm=0.05), EXACT)
    assert not verdict.passed
    assert verdict.plain.comparison is not None
    assert verdict.plain.comparison.violation is not None


def test_a_scheduler_that_all_layouts_forget_is_found_by_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "advance", lambda self, loss: None)
    verdict = verify(lambda: job(scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)), EXACT)
    assert not verdict.passed
    assert verdict.plain.comparison is not None
    violation = verdict.plain.comparison.violation
    assert violation is not None
    assert violation.step == 2
    assert "the scheduler" in violation.cause


def test_a_count_that_the_engine_forgets_is_found_by_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Worker._forward

    def forgetting(self: Worker, objective: Any, share: Any, i: int) -> Any:
        value = forward(self, objective, share, i)
        return type(value)(value.value, float(share.sizes[i]), value.is_sum, value.by_rows, value.extras)

    monkeypatch.setattr(Worker, "_forward", forgetting)
    assert not verify(ignoring, EXACT).passed


def test_another_seed_of_the_masks_is_found() -> None:
    seeds = iter([0, 1, 1, 1, 1, 1])
    verdict = verify(lambda: job(dropout, seed=next(seeds), shuffle=False), EXACT)
    assert verdict.layouts.violation is not None
    assert verdict.layouts.violation.kind == "loss"


class NeverDouble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel")
        return self.base(x)


def test_a_job_that_does_not_run_in_double_is_not_passed_in_silence() -> None:
    verdict = verify(lambda: job(NeverDouble), EXACT)
    assert verdict.layouts.identical
    assert not verdict.passed
    assert verdict.plain.why_not is not None
    assert "the job does not run in FP64 (RuntimeError: no kernel" in verdict.plain.why_not


def test_the_verdict_as_plain_values_names_what_differs() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (2.0 if on_second_worker() else 1.0)

    words = verify(lambda: job(loss=loss), EXACT).as_dict()
    assert (words["passed"], words["promised"], words["identical"], words["plan"]) == (False, "identical", False, EXACT)
    assert words["layouts"]["violation"]["name"] == "loss"
    assert words["plain"]["violation"] is None
