"""What a trainer remembers besides weights, and what a notebook does with it."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from paceline import Trainer
from paceline.checkpoint import CheckpointError, Checkpoints
from paceline.errors import UsageError
from paceline.evaluation import Best
from paceline.report.reports import EvaluationReport
from tests.resume.runs import (
    STEPS,
    Noisy,
    adamw,
    assert_same,
    copied,
    dropping_accuracy,
    job,
    judged,
    loss,
    plan,
    take,
    uninterrupted,
)


class Average:
    """Something of the user's that belongs to the run."""

    def __init__(self) -> None:
        self.total, self.shadow = 0, torch.zeros(2)

    def add(self, value: float) -> None:
        self.total += 1
        self.shadow = 0.9 * self.shadow + value

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.shadow = state["total"], state["shadow"].clone()


def test_objects_that_the_user_names_are_saved(tmp_path: Path) -> None:
    average, again = Average(), Average()
    with Trainer(job(), plan(2), objects={"average": average}) as trainer:
        for value in take(trainer, 3):
            average.add(value)
        trainer.save(tmp_path)
    with Trainer(job(), plan(1), objects={"average": again}) as trainer:
        trainer.resume(tmp_path)
    assert again.total == 3
    assert torch.equal(again.shadow, average.shadow)
    with (
        Trainer(job(), plan(1)) as trainer,
        pytest.raises(UsageError, match=r"saved object 'average' is not named here; .*nothing"),
    ):
        trainer.resume(tmp_path)


def test_generators_of_the_process_go_on_where_they_were(tmp_path: Path) -> None:
    """A loop of the user's draws from torch, numpy and Python between steps."""
    with Trainer(job(), plan(1)) as trainer:
        take(trainer, 2)
        trainer.save(tmp_path)
        drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    with Trainer(job(), plan(2)) as trainer:
        trainer.resume(tmp_path)
        assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == drawn


def lrs(trainer: Trainer, until: int) -> list[float]:
    return [trainer.step(batch).lr for batch in trainer.batches(steps=until)]


@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.05),
        lambda o: ReduceLROnPlateau(o, threshold=-1.0),  # takes every loss for the best, so that its state holds the last one
        lambda o: StepLR(o, step_size=2, gamma=0.5),
        lambda o, total: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / (2 * total)),
        lambda o, total: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=total + 1),
    ],
    ids=["plateau", "last-loss", "steps", "lambda", "one-cycle"],
)
def test_schedules_go_on(tmp_path: Path, scheduler: Any, every: str) -> None:
    """At every step of three epochs, stopping in the middle of one and at the end of one."""
    of = job(scheduler=scheduler, scheduler_every=every, steps=None, epochs=3)
    with Trainer(of, plan(1), total_steps=12) as trainer:
        expected = lrs(trainer, 12)
        state = copied(trainer.model)
        whole = trainer.save(tmp_path / "whole")
    found: list[float] = []
    for stop in (4, 6, 11, 12):
        with Trainer(of, plan(2), total_steps=12) as trainer:
            trainer.resume(tmp_path / "parts")
            found += lrs(trainer, stop)
            parts = trainer.save(tmp_path / "parts")
            resumed = copied(trainer.model)
    assert found == expected
    assert Checkpoints(parts.parent).load().schedulers == Checkpoints(whole.parent).load().schedulers
    assert_same(resumed, state)


def test_losses_in_turn_keep_their_optimizers_apart(tmp_path: Path) -> None:
    """A GAN: two optimizers of two kinds over two parts of one module."""

    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def of(part: str, kind: Any) -> Any:
        return lambda named: kind([entry for entry in named if entry[0].startswith(part)], lr=0.01)

    losses = {
        "critic": lambda m, b: (m.judge(m.make(b[0])) - m.judge(b[0])).mean(),
        "maker": lambda m, b: -m.judge(m.make(b[0])).square().mean(),
    }
    optimizers = {"critic": of("judge", torch.optim.RMSprop), "maker": of("make", torch.optim.Adam)}
    gan = job(
        model=Gan, loss=losses, optimizer=optimizers, steps=8, scheduler={"maker": lambda o: StepLR(o, step_size=2, gamma=0.5)}
    )
    expected = uninterrupted(gan)
    found: list[float] = []
    for replicas, stop in ((2, 3), (3, 5), (1, 8)):
        with Trainer(gan, plan(replicas)) as trainer:
            trainer.resume(tmp_path)
            found += take(trainer, stop, total=8)
            trainer.save(tmp_path)
            state = copied(trainer.model)
    assert found == expected.losses
    assert_same(state, expected.state)


def test_what_was_best_and_how_long_ago_is_remembered(tmp_path: Path) -> None:
    """The metric falls after step 4, so that is the best whether the run was interrupted or not, and patience counts on."""
    of, options = dropping_accuracy(4), {"evaluate_every": 2, "best": Best(metric="accuracy", mode="max", patience=3)}
    with Trainer(of, plan(1)) as trainer:
        trainer.fit(checkpoints=tmp_path / "whole", keep=1, **options)
        assert trainer.steps_done == 10
        expected = copied(trainer.model)
    of = dropping_accuracy(4)
    for stop in (5, 8, STEPS):
        with Trainer(of, plan(2), total_steps=STEPS) as trainer:
            trainer.resume(tmp_path / "parts")
            trainer.fit(steps=stop, checkpoints=tmp_path / "parts", keep=1, **options)
            state = copied(trainer.model)
    assert trainer.steps_done == 10
    assert_same(state, expected)
    for run in ("whole", "parts"):
        best = Checkpoints(tmp_path / run).best()
        assert best is not None
        assert best.name == "step-00000004"
    with Trainer(of, plan(1)) as trainer:
        trainer.resume(tmp_path / "parts")
        assert trainer.fit(checkpoints=tmp_path / "parts", **options) is None, "no step more where patience has run out"
        assert trainer.steps_done == 10


def test_patience_before_the_first_evaluation_and_without_a_number(tmp_path: Path) -> None:
    """Nothing is waited for before there is an evaluation; what is not a number is never better."""
    with Trainer(judged(), plan(1)) as trainer:
        trainer.fit(evaluate_every=5, best=Best(patience=1))
        assert trainer.steps_done >= 5
    with Trainer(job(held_out=Noisy(20), metrics={"nothing": lambda p, t: float("nan")}), plan(1)) as trainer:
        trainer.fit(evaluate_every=2, best=Best(metric="nothing", patience=2))
        assert trainer.steps_done == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("replicas", [1, 2])
def test_interrupting_a_cell_and_calling_fit_again_goes_on(number: signal.Signals, replicas: int, tmp_path: Path) -> None:
    """The step in which the signal comes is finished and saved, and the handlers are as before."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    expected = uninterrupted(job())
    steps: list[int] = []
    main, sent = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupting(module: nn.Module, batch: Any) -> Any:
        if len(steps) == 5 and not sent.is_set():
            sent.set()
            signal.pthread_kill(main, number)
        return loss(module, batch)

    with Trainer(job(loss=interrupting), plan(replicas)) as trainer:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            trainer.fit(loggers=[lambda report: steps.append(report.step)], checkpoints=tmp_path)
        # With worker threads the main one waits, and Python hands it the signal when it gets to run.
        assert trainer.steps_done in ((6,) if replicas == 1 else (6, 7))
        assert trainer.stopped
        assert isinstance(caught.value, SystemExit if number is signal.SIGTERM else KeyboardInterrupt)
        assert [path.name for path in Checkpoints(tmp_path).list()] == [f"step-{trainer.steps_done:08d}"]
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
        trainer.fit(loggers=[lambda report: steps.append(report.step)])
        assert steps == list(range(1, STEPS + 1))
        assert_same(copied(trainer.model), expected.state)


def test_nothing_is_loaded_of_what_does_not_fit(tmp_path: Path) -> None:
    with Trainer(job(), plan(1)) as trainer:
        take(trainer, 2)
        path = trainer.save(tmp_path)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"model": lambda: nn.Linear(6, 3)}, "weight is missing; .*nothing was loaded"),
        ({"optimizer": lambda named: torch.optim.SGD(named, lr=0.1)}, "is SGD, the checkpoint's is AdamW"),
        ({"batch_size": 12}, "it stopped within an epoch with batch_size=13, and batch_size=12 puts other batches there"),
        ({"seed": 1}, "it stopped within an epoch with seed=0, and seed=1 puts other batches there"),
    ]
    for change, message in changes:
        with Trainer(job(**change), plan(2)) as trainer:
            before = copied(trainer.model)
            with pytest.raises(UsageError, match=message):
                trainer.load(path)
            assert_same(copied(trainer.model), before)
            assert trainer.steps_done == 0
            assert trainer.check(path)[0]


def test_a_damaged_checkpoint_is_named_with_the_one_before_it(tmp_path: Path) -> None:
    """A flipped bit in the newest: nothing is loaded, and never silently an older one."""
    with Trainer(job(), plan(1)) as trainer:
        take(trainer, 2)
        whole = trainer.save(tmp_path)
        take(trainer, 4)
        damaged = trainer.save(tmp_path)
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 4
    (damaged / "model.safetensors").write_bytes(data)
    with Trainer(job(), plan(2)) as trainer:
        before = copied(trainer.model)
        with pytest.raises(CheckpointError, match=rf"model.safetensors: .* is damaged.*; {whole} is whole, use it instead"):
            trainer.resume(tmp_path)
        assert_same(copied(trainer.model), before)
        trainer.load(whole)
        assert trainer.steps_done == 2


def test_a_state_from_before_the_first_step_is_one_too(tmp_path: Path) -> None:
    """No moments, no schedule yet: what is not there yet is made, and not missed. Kinds C7, C17."""
    with Trainer(job(), plan(2)) as trainer:
        trainer.save(tmp_path)
    with Trainer(job(optimizer=adamw), plan(1)) as trainer:
        assert trainer.resume(tmp_path) is not None
        assert take(trainer, STEPS) == uninterrupted(job()).losses


def test_evaluations_before_and_after_are_the_same(tmp_path: Path) -> None:
    """The loss of held-out data does not move by saving, loading or changing the layout. Kinds C14, H2."""
    reports: list[EvaluationReport] = []
    with Trainer(judged(), plan(2)) as trainer:
        take(trainer, 5)
        reports.append(trainer.evaluate())
        trainer.save(tmp_path)
        reports.append(trainer.evaluate())
    for replicas in (1, 3):
        with Trainer(judged(), plan(replicas)) as trainer:
            trainer.resume(tmp_path)
            reports.append(trainer.evaluate())
    assert len({(report.loss, report["accuracy"]) for report in reports}) == 1
