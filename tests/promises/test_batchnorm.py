"""BatchNorm: running statistics do not depend on the layout; synchronised, they are those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import PlanError, Trainer, UsageError
from tests.promises.models import (
    FEATURES,
    assert_close,
    assert_identical,
    batchnorm,
    classes,
    cross_entropy,
    features,
    job,
    run,
    whole_batch_step,
)


class Twice(nn.Module):
    """One BatchNorm is called twice in a forward, another one only by training batches with a positive first entry."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES, momentum=momentum)
        self.rare = nn.BatchNorm1d(FEATURES, momentum=momentum)
        self.head = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(self.norm(x)))
        return self.head(self.rare(x) if x[0, 0] > 0 else x)


def momentum_of(value: float | None) -> Callable[[], nn.Module]:
    return lambda: batchnorm(value)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("make", [batchnorm, Twice])
def test_running_statistics_are_those_of_one_device_with_the_same_micro_batches(make: Any, momentum: float | None) -> None:
    """Held against plain torch: the micro-batches go through the module one after the other."""
    model, optimizer = make(momentum), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(features(13, seed), classes(13, seed)) for seed in (1, 2, 3)]
    for x, y in batches:
        optimizer.zero_grad()
        for part, labels in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            torch.autograd.backward(cross_entropy(model, (part, labels)) * len(part) / 13)
        optimizer.step()
    made = job(make(momentum), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
    for plan in ("replicas=1,micro_batches=4", "replicas=2,micro_batches=4", "replicas=3,micro_batches=4,reproducible=true"):
        made = job(make(momentum), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
        with Trainer(made, plan, timeout_s=20) as trainer:
            for batch in batches:
                trainer.step(batch)
            torch.testing.assert_close(dict(trainer.model.state_dict()), dict(model.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_every_worker_holds_the_same_statistics(momentum: float | None) -> None:
    with Trainer(job(Twice(momentum)), "replicas=3,micro_batches=4", timeout_s=20) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        states: list[dict[str, Tensor]] = []
        trainer.check_workers(lambda model, transport: states.append({k: b.clone() for k, b in model.named_buffers()}))
    assert len(states) == 3
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)


def test_frozen_statistics_stay() -> None:
    def frozen() -> nn.Module:
        model = batchnorm()
        model[1].eval()
        return model

    before = {name: buffer.clone() for name, buffer in frozen().named_buffers()}
    for plan in ("micro_batches=4", "replicas=2,micro_batches=4"):
        state = run(job(frozen), plan).state
        torch.testing.assert_close({name: state[name] for name in before}, before, rtol=0, atol=0)


def test_a_norm_put_into_evaluation_mode_between_steps_stays_from_then_on() -> None:
    with Trainer(job(batchnorm), "replicas=2,micro_batches=4", timeout_s=20) as trainer:
        batches = trainer.batches(steps=2)
        trainer.step(next(batches))
        trainer.model[1].eval()
        before = trainer.model[1].running_mean.clone()
        trainer.step(next(batches))
        assert torch.equal(trainer.model[1].running_mean, before)


def test_a_step_that_fails_leaves_the_statistics_as_they_were() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = cross_entropy(model, batch)
        if (batch[1] == 99).any():
            raise ValueError("label 99")
        return value

    model = batchnorm()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    labels = classes(8)
    labels[-1] = 99
    for plan in ("micro_batches=4", "replicas=2,micro_batches=4"):
        with Trainer(job(model, loss=lambda m, b: loss(m, b)), plan, timeout_s=20) as trainer:
            with pytest.raises((ValueError, IndexError)):
                trainer.step((features(8), labels))
            torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def sgd_01(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


class Image(nn.Module):
    """BatchNorm over images, with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4, momentum=None)
        self.bare, self.head = nn.BatchNorm2d(4, affine=False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 3).view(-1, 2, 3, 3)
        return self.head(self.bare(torch.relu(self.norm(self.conv(x)))).flatten(1))


@pytest.mark.parametrize("make", [batchnorm, Image])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_synchronised_it_is_the_whole_batch_on_one_device(make: Callable[[], nn.Module], replicas: int) -> None:
    """Weights, and so gradients, and running statistics, with uneven micro-batches; in double precision to 1e-10."""
    batches = [(features(13, seed).double(), classes(13, seed)) for seed in (1, 2, 3)]
    model = make().double()
    optimizer = sgd_01(model.parameters())
    losses = [whole_batch_step(model, cross_entropy, batch, optimizer) for batch in batches]
    made = job(make().double(), optimizer=sgd_01, sync_batchnorm=True)
    with Trainer(made, f"replicas={replicas},micro_batches={replicas}", timeout_s=20) as trainer:
        assert [trainer.step(batch).loss for batch in batches] == pytest.approx(losses, rel=1e-10)
        torch.testing.assert_close(dict(trainer.model.state_dict()), dict(model.state_dict()), rtol=1e-10, atol=1e-10)


def test_not_synchronised_it_is_not_the_whole_batch() -> None:
    """The comparison above can fail."""
    with pytest.raises(AssertionError):
        assert_close(run(job(batchnorm), "replicas=2"), run(job(batchnorm), "replicas=1,micro_batches=1"))


def test_synchronised_it_needs_one_micro_batch_for_each_replica() -> None:
    with pytest.raises(PlanError, match=r"one micro-batch per replica, got micro_batches=4 for replicas=2; pass micro_batches=2"):
        Trainer(job(batchnorm, sync_batchnorm=True), "replicas=2,micro_batches=4")


def test_synchronised_it_needs_rows_on_every_replica() -> None:
    with (
        Trainer(job(batchnorm, sync_batchnorm=True), "replicas=3", timeout_s=20) as trainer,
        pytest.raises(UsageError, match=r"sync_batchnorm needs rows on every replica, got \(1, 1, 0\)"),
    ):
        trainer.step((features(2), classes(2)))


def test_synchronised_in_evaluation_mode_it_uses_the_running_statistics() -> None:
    made = job(batchnorm, sync_batchnorm=True, held_out=(features(9), classes(9)))
    with Trainer(made, "replicas=2", timeout_s=20) as trainer:
        trainer.step((features(8), classes(8)))
        loss = trainer.evaluate().loss
        trainer.model.eval()
        with torch.no_grad():
            assert loss == pytest.approx(float(cross_entropy(trainer.model, (features(9), classes(9)))), rel=1e-5)


class Functional(nn.Module):
    """Normalises by a function over buffers of its own, as some model libraries do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(FEATURES, 3)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("variance", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.batch_norm(x, self.mean, self.variance, training=True))


def test_statistics_that_a_function_moves_are_seen() -> None:
    """torch's batch_norm writes the running statistics without counting up their version."""
    with pytest.raises(UsageError, match=r"the forward changes the buffer\(s\) mean, variance"):
        run(job(Functional), "replicas=2")


def test_statistics_that_a_function_moves_can_have_a_rule() -> None:
    rules = {"mean": "mean", "variance": "mean"}
    pieces = "micro_batches=4,reproducible=true"
    assert_identical(run(job(Functional, buffers=rules), f"replicas=2,{pieces}"), run(job(Functional, buffers=rules), pieces))
