"""Evaluation and prediction: every sample once, in order, whoever computes it; and an epoch is an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from paceline import Trainer, UsageError
from tests.promises.models import CLASSES, batchnorm, classes, cross_entropy, dataset, dropout, features, job, mlp

PLANS = ["micro_batches=1", "replicas=2", "replicas=3,micro_batches=4"]


def accuracy(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions.argmax(1) == targets).float().mean()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("rows", [1, 5, 26, 27])
def test_each_sample_counts_once(plan: str, rows: int) -> None:
    """Five samples on two workers: padding would count one of them twice."""
    seen: list[int] = []

    def number(predictions: Tensor, targets: Tensor) -> int:
        seen.extend(targets.tolist())
        return len(targets)

    data = torch.utils.data.TensorDataset(features(rows), torch.arange(rows))
    with Trainer(job(), plan, timeout_s=20) as trainer:
        report = trainer.evaluate([(x, y % CLASSES) for x, y in data], {"number": number})
        assert (report["number"], report.rows) == (rows, rows)
        seen.clear()
        no_loss = Trainer(job(loss={"a": cross_entropy, "b": cross_entropy}, optimizer={"a": _sgd, "b": _sgd}), plan, timeout_s=20)
        with no_loss:
            assert no_loss.evaluate(data, {"number": number}).loss is None
        assert seen == list(range(rows))


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("plan", PLANS)
def test_loss_metrics_and_predictions_are_those_of_the_whole_data_at_once(plan: str) -> None:
    data = dataset(27)
    model = batchnorm().eval()
    with torch.no_grad():
        outputs = model(data.tensors[0])
        expected = float(cross_entropy(model, data.tensors))
    made = job(batchnorm, metrics={"function": accuracy, "object": MulticlassAccuracy(CLASSES, average="micro")})
    with Trainer(made, plan, timeout_s=20) as trainer:
        report = trainer.evaluate(data)
        torch.testing.assert_close(trainer.predict(data), outputs)
        assert report.loss == pytest.approx(expected, rel=1e-5)
        assert report["function"] == report["object"] == pytest.approx(float(accuracy(outputs, data.tensors[1])))
        assert trainer.evaluate(data)["object"] == report["object"], "metrics start anew"


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_leaves_modes_weights_and_statistics(plan: str) -> None:
    model = batchnorm()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Trainer(job(model, held_out=dataset(13)), plan, timeout_s=20) as trainer:
        trainer.evaluate()
        assert [module.training for module in trainer.model] == [True, True, False, True]
        torch.testing.assert_close(dict(trainer.model.state_dict()), before, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_between_steps_does_not_change_the_run(plan: str) -> None:
    def losses(evaluating: bool) -> list[float]:
        made = job(dropout, held_out=dataset(9), metrics={"accuracy": accuracy})
        with Trainer(made, plan, timeout_s=20) as trainer:
            found = []
            for batch in trainer.batches(steps=4):
                found.append(trainer.step(batch).loss)
                if evaluating:
                    trainer.evaluate()
            return found

    assert losses(True) == losses(False)


def test_predictions_of_several_parts_keep_their_structure() -> None:
    def predict(model: nn.Module, batch: Any) -> dict[str, Any]:
        output = model(batch[0])
        return {"output": output, "best": (output.argmax(1), [float(row.max()) for row in output])}

    with Trainer(job(predict=predict), "replicas=3,micro_batches=4", timeout_s=20) as trainer:
        predictions = trainer.predict(dataset(14))
    with torch.no_grad():
        expected = mlp()(features(14))
    torch.testing.assert_close(predictions["output"], expected)
    assert torch.equal(predictions["best"][0], expected.argmax(1))
    assert predictions["best"][1] == pytest.approx(expected.amax(1).tolist())


def test_batches_that_are_no_pairs_need_a_word() -> None:
    data = [{"x": x, "y": y} for x, y in zip(features(4), classes(4), strict=True)]
    made = job(loss=lambda m, b: cross_entropy(m, (b["x"], b["y"])), metrics={"accuracy": accuracy}, held_out=data)
    with Trainer(made, "replicas=2", timeout_s=20) as trainer, pytest.raises(UsageError, match=r"pass Job\(predict=lambda model"):
        trainer.evaluate()


def test_nothing_to_evaluate_is_refused() -> None:
    with Trainer(job()) as trainer:
        with pytest.raises(UsageError, match=r"there is no data to evaluate; pass evaluate\(data\)"):
            trainer.evaluate()
        with pytest.raises(UsageError, match="empty"):
            trainer.evaluate([])


def test_a_metric_that_is_no_number_is_refused_by_name() -> None:
    trainer = Trainer(job(metrics={"odd": lambda p, t: "high"}, held_out=dataset(4)))
    with trainer, pytest.raises(UsageError, match="metric 'odd' came to 'high', which is not one number"):
        trainer.evaluate()


@pytest.mark.parametrize("plan", PLANS)
def test_an_epoch_has_the_same_steps_and_samples_in_every_layout(plan: str) -> None:
    seen: list[float] = []
    data = torch.utils.data.TensorDataset(torch.arange(23.0).view(23, 1), torch.zeros(23))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0].flatten().tolist())
        return model(batch[0]).square().mean()

    with Trainer(job(nn.Linear(1, 1), loss=loss, data=data, batch_size=5), plan, timeout_s=20) as trainer:
        for epoch in (1, 2):
            reports = [trainer.step(batch) for batch in trainer.batches(epochs=epoch)]
            assert [report.rows for report in reports] == [5, 5, 5, 5, 3]
            assert [report.epoch for report in reports] == [epoch - 1] * 5
            assert sorted(seen) == [float(i) for i in range(23)]
            seen.clear()
