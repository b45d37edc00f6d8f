"""The loss and the gradients are those of the whole batch, however it is cut and whoever computes the pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Trainer, UsageError, count_valid
from tests.promises.models import classes, cross_entropy, features, job, linear, mlp, run, whole_batch_step

LAYOUTS = ["replicas=1,micro_batches=4", "replicas=2", "replicas=3,micro_batches=5", "replicas=4,micro_batches=7,reproducible=true"]


def plain_sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1.0)


def one_step(plan: str, loss: Any, batch: Any, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    with Trainer(job(mlp, loss=loss, optimizer=plain_sgd, data=None, batch_size=None, **changes), plan, timeout_s=20) as trainer:
        report = trainer.step(batch)
        return report.loss, {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def check_like_plain(plan: str, loss: Any, batch: Any, plain: Any, **changes: Any) -> None:
    value, state = one_step(plan, loss, batch, **changes)
    model = mlp()
    expected = whole_batch_step(model, plain, batch, torch.optim.SGD(model.parameters(), lr=1.0))
    assert value == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", LAYOUTS)
@pytest.mark.parametrize("rows", [8, 13])
def test_a_mean_over_uneven_pieces_is_the_mean_over_the_batch(plan: str, rows: int) -> None:
    """Thirteen rows over two replicas are 7 and 6: a mean of the two means would be biased."""
    check_like_plain(plan, cross_entropy, (features(rows), classes(rows)), cross_entropy)


@pytest.mark.parametrize("plan", LAYOUTS)
def test_a_sum_with_its_count_is_the_mean_over_the_count(plan: str) -> None:
    def summed(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    check_like_plain(plan, summed, (features(13), classes(13)), cross_entropy)


@pytest.mark.parametrize("plan", LAYOUTS)
def test_a_sum_with_count_1_stays_a_sum_over_the_pieces(plan: str) -> None:
    """Who wants the plain sum of a batch returns it over a count of which the pieces add up to 1."""

    def summed(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]) / 13

    def plain(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    check_like_plain(plan, summed, (features(13), classes(13)), plain)


@pytest.mark.parametrize("plan", LAYOUTS)
def test_fewer_rows_than_micro_batches_train_like_the_whole_batch(plan: str) -> None:
    check_like_plain(plan, cross_entropy, (features(3), classes(3)), cross_entropy)


def labels_with_ignored() -> Tensor:
    labels = classes(13)
    labels[[0, 1, 2, 3, 5, 11]] = -100  # with 4 micro-batches the first has nothing that counts
    return labels


@pytest.mark.parametrize("plan", [*LAYOUTS, "micro_batches=1"])
def test_ignored_labels_without_a_count_are_refused(plan: str) -> None:
    with pytest.raises(UsageError, match=r"1 holds -100, the index that losses ignore.*Pass Job\(count=count_valid"):
        one_step(plan, cross_entropy, (features(13), labels_with_ignored()))


@pytest.mark.parametrize("plan", LAYOUTS)
def test_ignored_labels_with_count_valid_weigh_as_in_the_whole_batch(plan: str) -> None:
    batch = (features(13), labels_with_ignored())
    check_like_plain(plan, cross_entropy, batch, cross_entropy, count=count_valid("1"))


@pytest.mark.parametrize("plan", LAYOUTS)
def test_ignored_labels_with_sum_and_count_weigh_as_in_the_whole_batch(plan: str) -> None:
    def summed(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum()

    check_like_plain(plan, summed, (features(13), labels_with_ignored()), cross_entropy)


def test_a_batch_in_which_nothing_counts_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the count of the whole batch is 0"):
        one_step("replicas=2", cross_entropy, (features(8), torch.full((8,), -100)), count=count_valid("1"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluation_with_ignored_labels_is_exact_with_a_count(replicas: int) -> None:
    batch = (features(13), labels_with_ignored())
    with Trainer(job(linear, count=count_valid("1")), f"replicas={replicas},micro_batches=3", timeout_s=20) as trainer:
        with torch.no_grad():
            expected = float(cross_entropy(trainer.model, batch))
        assert trainer.evaluate(torch.utils.data.TensorDataset(*batch)).loss == pytest.approx(expected, rel=1e-6)


def test_evaluation_with_ignored_labels_and_no_count_is_refused() -> None:
    """A mean of means in an evaluation is as wrong as in a step."""
    data = torch.utils.data.TensorDataset(features(13), labels_with_ignored())
    with Trainer(job(linear), "micro_batches=3") as trainer, pytest.raises(UsageError, match="holds -100"):
        trainer.evaluate(data)


@pytest.mark.parametrize("plan", LAYOUTS)
def test_extras_are_weighted_like_the_loss(plan: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch), {"feature": batch[0][:, 0].mean(), "two": 2.0}

    with Trainer(job(mlp, loss=loss), plan, timeout_s=20) as trainer:
        report = trainer.step((features(13), classes(13)))
    assert report.metrics["feature"] == pytest.approx(float(features(13)[:, 0].mean()), rel=1e-5)
    assert report.metrics["two"] == 2.0


def test_extras_of_a_piece_in_which_nothing_counts_have_no_part() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        value = cross_entropy(model, batch)
        return value, {"copy": value.detach()}

    labels = classes(8)
    labels[:4] = -100
    with Trainer(job(mlp, loss=loss, count=count_valid("1")), "micro_batches=2") as trainer:
        report = trainer.step((features(8), labels))
    assert report.metrics["copy"] == pytest.approx(report.loss)


def test_extras_that_differ_between_micro_batches_are_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return cross_entropy(model, batch), {f"rows {len(batch[0])}": 1.0}

    with pytest.raises(UsageError, match="different forms for micro-batches"):
        run(job(loss=loss), "replicas=2", steps=1)


def test_the_clipping_norm_is_that_of_the_whole_batch() -> None:
    model, batch = mlp(), (features(13), classes(13))
    torch.autograd.backward(cross_entropy(model, batch))
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for plan in LAYOUTS:
        with Trainer(job(mlp, optimizer=plain_sgd, clip_norm=0.05), plan, timeout_s=20) as trainer:
            assert trainer.step(batch).grad_norm == pytest.approx(expected, rel=1e-5)
            torch.testing.assert_close(dict(trainer.model.state_dict()), dict(model.state_dict()), rtol=1e-5, atol=1e-6)


def test_an_infinite_clipping_norm_reports_and_does_not_clip() -> None:
    clipped, free = run(job(clip_norm=float("inf")), "replicas=2"), run(job(), "replicas=2")
    assert clipped.losses == free.losses
    assert all(norm is not None and norm > 0 for norm in clipped.norms)
    assert free.norms == [None] * 3


def test_the_report_counts_what_the_mean_was_taken_over() -> None:
    with Trainer(job(linear, count=count_valid("1")), "replicas=2", timeout_s=20) as trainer:
        report = trainer.step((features(13), labels_with_ignored()))
    assert (report.rows, report.count) == (13, 7)
