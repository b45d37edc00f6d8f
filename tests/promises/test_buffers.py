"""Buffers that a forward changes: merged by the user's rule alike in every layout, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Trainer, UsageError
from tests.promises.models import FEATURES, assert_identical, classes, features, job, mlp, run


class Counting(nn.Module):
    """Keeps a statistic of its inputs in a buffer, in place or by replacing it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.base = how, mlp()
        self.register_buffer("kept", torch.zeros(FEATURES))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.how == "in place":
                self.kept.add_(x.detach().sum(0))
            elif self.how == "replaced":
                self.kept = self.kept + x.detach().sum(0)
            elif self.how == "largest":
                torch.maximum(self.kept, x.detach().amax(0), out=self.kept)
            elif self.how == "through data":
                self.kept.data.add_(x.detach().sum(0))
        return self.base(x)


def average(before: Tensor, values: Sequence[Tensor]) -> Tensor:
    return 0.5 * before + 0.5 * torch.stack(list(values)).mean(0)


@pytest.mark.parametrize("rule", ["sum", "mean", "max", "min", "last", average])
@pytest.mark.parametrize("how", ["in place", "replaced", "largest"])
def test_a_rule_gives_the_same_buffer_in_every_layout(how: str, rule: Any) -> None:
    made = [job(lambda: Counting(how), buffers={"kept": rule}) for _ in range(3)]
    reference = run(made[0], "replicas=1,micro_batches=5,reproducible=true")
    assert not torch.equal(reference.state["kept"], torch.zeros(FEATURES))
    for replicas, one in zip((2, 4), made[1:], strict=True):
        assert_identical(run(one, f"replicas={replicas},micro_batches=5,reproducible=true"), reference)


def test_the_sum_of_a_counter_counts_every_row_once() -> None:
    model = Counting("in place")
    batch = (features(13), classes(13))
    with Trainer(job(model, buffers={"kept": "sum"}), "replicas=3,micro_batches=5", timeout_s=20) as trainer:
        trainer.step(batch)
    torch.testing.assert_close(model.kept, batch[0].sum(0), rtol=1e-5, atol=1e-5)


def test_every_worker_starts_the_next_step_from_the_merged_buffer() -> None:
    with Trainer(job(lambda: Counting("in place"), buffers={"kept": "last"}), "replicas=3", timeout_s=20) as trainer:
        trainer.step((features(12), classes(12)))
        kept: list[Tensor] = []
        trainer.check_workers(lambda model, _: kept.append(model.kept.clone()))
    assert len(kept) == 3
    assert all(torch.equal(value, kept[0]) for value in kept)
    torch.testing.assert_close(kept[0], features(12)[8:].sum(0))


@pytest.mark.parametrize("how", ["in place", "replaced", "largest"])
@pytest.mark.parametrize("pieces", [2, 4, 6])
def test_a_buffer_without_a_rule_is_refused_by_name_with_replicas(how: str, pieces: int) -> None:
    with pytest.raises(
        UsageError, match=r"the forward changes the buffer\(s\) kept, and each of 2 workers .*buffers=\{'kept': RULE"
    ):
        run(job(lambda: Counting(how)), f"replicas=2,micro_batches={pieces}")


def test_a_buffer_that_is_changed_past_its_version_is_refused_with_replicas() -> None:
    with pytest.raises(UsageError, match=r"the forward changes the buffer\(s\) kept"):
        run(job(lambda: Counting("through data")), "replicas=2")


def test_a_refused_buffer_stops_before_the_weights_move() -> None:
    model = Counting("in place")
    with pytest.raises(UsageError, match="kept"):
        run(job(model), "replicas=2")
    assert torch.equal(model.base[0].weight, mlp()[0].weight)


def test_a_buffer_without_a_rule_is_as_ever_on_one_worker() -> None:
    model = Counting("in place")
    run(job(model), "replicas=1,micro_batches=3", steps=1)
    assert not torch.equal(model.kept, torch.zeros(FEATURES))


def test_a_cache_stays_each_workers_own() -> None:
    run(job(lambda: Counting("in place"), buffers={"kept": "cache"}), "replicas=2")


def test_a_rule_for_an_unknown_buffer_is_refused_at_construction() -> None:
    message = r"buffers names 'keept', which is not a buffer of the model; it has constant, kept"
    with pytest.raises(UsageError, match=message):
        Trainer(job(lambda: Counting("in place"), buffers={"keept": "sum"}), "replicas=2")
