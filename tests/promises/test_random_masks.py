"""Random numbers drawn in a forward belong to the step and the micro-batch, not to the worker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import Trainer, UsageError
from tests.promises.models import CLASSES, FEATURES, assert_identical, classes, cross_entropy, dropout, features, job, mlp, run

PIECES = "micro_batches=4,reproducible=true"


class Attention(nn.Module):
    """Dropout in attention, in an LSTM between layers, and noise on the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.inner, self.head = nn.Linear(FEATURES, 16), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x + 0.1 * torch.randn_like(x)).view(-1, 2, 8)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)
        return self.head(self.recurrent(h)[0][:, -1])


@pytest.mark.parametrize("model", [dropout, Attention])
@pytest.mark.parametrize("replicas", [2, 3])
def test_masks_do_not_depend_on_the_layout(model: Any, replicas: int) -> None:
    assert_identical(run(job(model), f"replicas={replicas},{PIECES}"), run(job(model), PIECES))


def test_masks_differ_from_step_to_step_and_between_micro_batches() -> None:
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.rand(3)
        seen.append(noise)
        return cross_entropy(model, batch)

    run(job(loss=loss), "micro_batches=2", steps=3)
    assert len({tuple(noise.tolist()) for noise in seen}) == 6


def test_masks_depend_on_the_seed_of_the_job_alone() -> None:
    first = run(job(dropout, seed=5), PIECES)
    torch.manual_seed(1234)
    random.seed(1234)
    assert_identical(run(job(dropout, seed=5), PIECES), first)
    assert run(job(dropout, seed=6), PIECES).losses != first.losses


@pytest.mark.parametrize("plan", ["replicas=1,micro_batches=2", "replicas=2"])
def test_the_users_generators_do_not_move(plan: str) -> None:
    with Trainer(job(dropout, held_out=(features(9), classes(9))), plan, timeout_s=20) as trainer:
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        expected = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        trainer.evaluate()
        assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == expected


class Drawing(nn.Module):
    """Draws from a generator that a process has only one of."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw, self.base = draw, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * (1 + self.draw())


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python"), (np.random.rand, "numpy")])
def test_draws_from_numpy_or_python_are_refused_on_threads_before_the_weights_move(draw: Any, name: str) -> None:
    model = Drawing(draw)
    with pytest.raises(UsageError, match=rf"the model draws from {name}'s generator.*transport='processes'"):
        run(job(model), "replicas=2", steps=1)
    assert torch.equal(model.base[0].weight, mlp()[0].weight)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_from_numpy_or_python_are_seeded_on_one_worker(draw: Any) -> None:
    first = run(job(lambda: Drawing(draw)), PIECES)
    draw()
    assert_identical(run(job(lambda: Drawing(draw)), PIECES), first)


class Recomputing(nn.Module):
    def __init__(self, p: float, *, reentrant: bool = False, on: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(FEATURES, 16), nn.Dropout(p), nn.Linear(16, CLASSES)
        self.reentrant, self.on = reentrant, on

    def block(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x.clone().requires_grad_(self.reentrant), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_draws_the_same_masks_on_one_worker(reentrant: bool) -> None:
    recomputed = run(job(lambda: Recomputing(0.5, reentrant=reentrant)), PIECES)
    assert_identical(recomputed, run(job(lambda: Recomputing(0.5, on=False)), PIECES))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_a_draw_is_right_or_refused_on_threads(reentrant: bool) -> None:
    """Other masks in the second forward would be wrong gradients without a word."""
    reference = run(job(lambda: Recomputing(0.5, on=False)), PIECES)
    try:
        ran = run(job(lambda: Recomputing(0.5, reentrant=reentrant)), f"replicas=2,{PIECES}")
    except UsageError as error:
        assert "torch.utils.checkpoint around dropout" in str(error)  # noqa: PT017 - either is fine
        assert "transport='processes'" in str(error)  # noqa: PT017
        return
    assert_identical(ran, reference)


class RecomputingWithoutDraws(Recomputing):
    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_without_draws_is_fine_on_threads(reentrant: bool) -> None:
    made = [job(lambda: RecomputingWithoutDraws(0.0, reentrant=reentrant)) for _ in range(2)]
    assert_identical(run(made[0], f"replicas=2,{PIECES}"), run(made[1], PIECES))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_around_a_dropout_that_draws_nothing_is_fine_on_threads(reentrant: bool) -> None:
    made = [job(lambda: Recomputing(0.0, reentrant=reentrant)) for _ in range(2)]
    assert_identical(run(made[0], f"replicas=2,{PIECES}"), run(made[1], PIECES))


def test_evaluation_draws_alike_in_every_layout() -> None:
    data = (features(13), classes(13))

    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] + torch.randn_like(batch[0]))

    values = []
    for plan in ("micro_batches=4", "replicas=3,micro_batches=4"):
        with Trainer(job(predict=noisy), plan, timeout_s=20) as trainer:
            values.append(trainer.predict(data))
    assert torch.equal(values[0], values[1])
