"""Learning rates and several losses: as in a plain loop, whatever the number of workers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from transformers import get_linear_schedule_with_warmup

from paceline import Trainer, UsageError
from tests.promises.models import FEATURES, assert_identical, classes, features, job, run

PLANS = ["replicas=1,micro_batches=4", "replicas=2,micro_batches=4", "replicas=4,reproducible=true"]


def sgd_1(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1.0)


@pytest.mark.parametrize("plan", PLANS)
def test_the_scheduler_steps_once_for_each_step(plan: str) -> None:
    ran = run(job(optimizer=sgd_1, scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5)), plan, steps=4)
    assert ran.lrs == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("plan", PLANS)
def test_a_schedule_with_warmup_ends_at_the_last_step(plan: str) -> None:
    made = job(optimizer=sgd_1, scheduler=lambda o, total_steps: get_linear_schedule_with_warmup(o, 2, total_steps))
    with Trainer(made, plan, timeout_s=20) as trainer:
        lrs = [trainer.step(batch).lr for batch in trainer.batches(epochs=3)]
    assert lrs == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("plan", PLANS)
def test_a_scheduler_by_epochs_steps_once_for_each_epoch(plan: str) -> None:
    made = job(optimizer=sgd_1, scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5), scheduler_every="epoch")
    with Trainer(made, plan, timeout_s=20) as trainer:
        assert [trainer.step(batch).lr for batch in trainer.batches(epochs=3)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("plan", PLANS)
def test_reduce_on_plateau_sees_the_loss_of_the_step(plan: str) -> None:
    made = job(
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-6),  # so that the loss stands still
        data=(features(4), classes(4)),
        batch_size=4,
        shuffle=False,
        scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    )
    ran = run(made, plan, steps=6)
    assert ran.lrs == pytest.approx([1e-6, 1e-6, 1e-6, 0.5e-6, 0.5e-6, 0.25e-6], rel=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_reduce_on_plateau_by_epochs_sees_the_mean_of_the_epoch(plan: str) -> None:
    class Watching(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(float(metrics))
            super().step(metrics)

    seen: list[float] = []
    made = job(scheduler=lambda o: Watching(o), scheduler_every="epoch", batch_size=10)
    with Trainer(made, plan, timeout_s=20) as trainer:
        reports = [trainer.step(batch) for batch in trainer.batches(epochs=2)]
    for epoch in (0, 1):
        mine = [report for report in reports if report.epoch == epoch]
        assert seen[epoch] == pytest.approx(sum(r.loss * r.rows for r in mine) / sum(r.rows for r in mine), rel=1e-6)
    assert len(seen) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_a_scheduler_that_wants_an_unknown_number_of_steps_is_refused_at_once(plan: str) -> None:
    made = job(scheduler=lambda o, total_steps: lr_scheduler.ConstantLR(o, total_iters=total_steps))
    with Trainer(made, plan, timeout_s=20) as trainer:
        began = time.monotonic()
        with pytest.raises(UsageError, match=r"needs the number of steps, which is not known; train with batches\(steps=...\)"):
            trainer.step((features(8), classes(8)))
        assert time.monotonic() - began < 5


class Gan(nn.Module):
    """A generator and a critic; each loss goes through both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, FEATURES))
        self.critic, self.unused = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1)), nn.Linear(2, 2)


def critic_loss(model: nn.Module, batch: Any) -> Tensor:
    fake = model.generator(batch[0].flip(1))
    return F.softplus(model.critic(fake.detach())).mean() + F.softplus(-model.critic(batch[0])).mean()


def generator_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.softplus(-model.critic(model.generator(batch[0].flip(1)))).mean()


def of(part: str) -> Any:
    return lambda named: torch.optim.Adam([(name, p) for name, p in named if name.startswith((part, "unused"))], lr=0.05)


def gan(**changes: Any) -> Any:
    losses, optimizers = (
        {"critic": critic_loss, "generator": generator_loss},
        {"critic": of("critic"), "generator": of("generator")},
    )
    return job(Gan, loss=losses, optimizer=optimizers, **changes)


def test_two_losses_in_turn_are_the_plain_loop() -> None:
    """On one worker with one micro-batch; the other layouts are held against that."""
    model = Gan()
    optimizers = {
        "critic": of("critic")(list(model.named_parameters())),
        "generator": of("generator")(list(model.named_parameters())),
    }
    batches = [(features(8, seed), classes(8)) for seed in (1, 2, 3)]
    expected = []
    for batch in batches:
        for name, loss in (("critic", critic_loss), ("generator", generator_loss)):
            model.zero_grad()
            value = loss(model, batch)
            torch.autograd.backward(value)
            optimizers[name].step()
            expected.append(float(value.detach()))
    with Trainer(gan(), "micro_batches=1") as trainer:
        reports = [trainer.step(batch) for batch in batches]
        torch.testing.assert_close(dict(trainer.model.state_dict()), dict(model.state_dict()))
    assert [loss for report in reports for loss in (report.losses["critic"], report.losses["generator"])] == pytest.approx(expected)


@pytest.mark.parametrize("replicas", [2, 3])
def test_two_losses_in_turn_give_the_same_bits_in_every_layout(replicas: int) -> None:
    pieces = "micro_batches=4,reproducible=true"
    assert_identical(run(gan(clip_norm=0.5), f"replicas={replicas},{pieces}"), run(gan(clip_norm=0.5), pieces))


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_moves_only_the_parameters_of_its_optimizer(plan: str) -> None:
    def still(part: str) -> Any:
        return lambda named: torch.optim.SGD(
            [(n, p) for n, p in named if n.startswith(part)], lr=0.0 if part == "generator" else 0.1
        )

    made = job(
        Gan, loss={"critic": critic_loss, "generator": generator_loss},
        optimizer={"critic": still("critic"), "generator": still("generator")},
    )  # fmt: skip
    state, before = run(made, plan).state, Gan().state_dict()
    assert torch.equal(state["generator.0.weight"], before["generator.0.weight"])
    assert not torch.equal(state["critic.0.weight"], before["critic.0.weight"])


def test_extras_and_rates_of_several_losses_have_the_names_of_their_losses() -> None:
    def with_extra(model: nn.Module, batch: Any) -> Any:
        return generator_loss(model, batch), {"score": 3.0}

    made = job(
        Gan, loss={"critic": critic_loss, "generator": with_extra},
        optimizer={"critic": of("critic"), "generator": of("generator")},
        scheduler={"critic": lambda o: lr_scheduler.ExponentialLR(o, 0.5)},
    )  # fmt: skip
    with Trainer(made, "replicas=2", timeout_s=20) as trainer:
        reports = [trainer.step((features(8), classes(8))) for _ in range(2)]
    assert reports[0].metrics == {"generator/score": 3.0}
    assert reports[1].lrs == {"critic": 0.025, "generator": 0.05}
    assert reports[0].loss == pytest.approx(reports[0].losses["critic"] + reports[0].losses["generator"])
