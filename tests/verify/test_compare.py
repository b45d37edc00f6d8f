"""What rounding can do is allowed, and a missing update, a scaled gradient or a NaN is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.verify import StepRecord, compare
from paceline.verify.proof import ROUNDING
from paceline.verify.records import first_difference, snapshot

NOISE = ROUNDING["fp32"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, small rate": lambda p: torch.optim.SGD(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def records(optimizer: str, seed: int, *, skip: str | None = None, shift: float = 0.0, steps: int = 3) -> list[StepRecord]:
    """Train a small net; leave out the update of `skip` in every step, or add noise of relative size `shift` to the gradients."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    made = OPTIMIZERS[optimizer]([p for n, p in model.named_parameters() if n != skip])
    noise = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        for parameter in model.parameters():
            assert parameter.grad is not None
            size = parameter.grad.abs().max()
            parameter.grad += shift * size * (2 * torch.rand(parameter.shape, generator=noise) - 1)
        made.step()
        rates = {"loss": float(made.param_groups[0]["lr"])}
        found.append(StepRecord(step, {"loss": float(loss.detach())}, rates, snapshot(model)))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "2.weight", "4.bias"])
def test_a_missing_update_of_one_parameter_does_not_pass(name: str, optimizer: str, seed: int) -> None:
    violation = compare(records(optimizer, seed, skip=name), records(optimizer, seed), NOISE).violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.name) == (1, "weight", name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_of_gradients_passes_over_five_steps(optimizer: str, seed: int) -> None:
    ran = records(optimizer, seed, shift=NOISE / 10, steps=5)
    comparison = compare(ran, records(optimizer, seed, steps=5), NOISE)
    assert comparison.violation is None, comparison.violation
    assert not comparison.identical


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_times_the_rounding_does_not_pass(optimizer: str) -> None:
    assert compare(records(optimizer, 0, shift=10 * NOISE), records(optimizer, 0), NOISE).violation is not None


def test_equal_runs_are_identical() -> None:
    comparison = compare(records("SGD", 0), records("SGD", 0), 0.0)
    assert comparison.identical
    assert comparison.violation is None


def with_tensor(name: str, tensor: Tensor | None) -> list[StepRecord]:
    record = records("SGD", 0, steps=1)[0]
    tensors = {key: value for key, value in record.tensors.items() if key != name or tensor is not None}
    return [StepRecord(1, record.losses, record.lrs, tensors if tensor is None else tensors | {name: tensor})]


def test_where_bits_are_asked_for_the_last_bit_counts() -> None:
    reference = with_tensor("", None)
    weight = reference[0].tensors["weight/0.weight"].clone()
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    changed = with_tensor("weight/0.weight", weight)
    violation = compare(changed, reference, 0.0).violation
    assert violation is not None
    assert (violation.kind, violation.name) == ("weight", "0.weight")
    assert compare(changed, reference, NOISE).violation is None


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_a_nan_in_one_run_does_not_pass(noise: float) -> None:
    reference = with_tensor("", None)
    weight = reference[0].tensors["weight/0.weight"].clone()
    weight[0, 0] = math.nan
    violation = compare(with_tensor("weight/0.weight", weight), reference, noise).violation
    assert violation is not None
    assert violation.largest == math.inf


def test_a_nan_in_both_runs_at_one_place_is_no_difference() -> None:
    a = torch.tensor([1.0, math.nan])
    assert first_difference(a, a.clone()) == 0.0
    assert first_difference(a, torch.tensor([1.5, math.nan])) == 0.5


@pytest.mark.parametrize("name", ["weight/0.weight", "gradient/0.weight"])
def test_a_tensor_that_only_one_run_has_does_not_pass(name: str) -> None:
    for ran, reference, which in (
        (with_tensor(name, None), with_tensor("", None), "one worker"),
        (with_tensor("", None), with_tensor(name, None), "the plan"),
    ):
        violation = compare(ran, reference, NOISE).violation
        assert violation is not None
        assert f"only {which} has it" in violation.cause
        assert violation.largest == math.inf


def test_another_dtype_does_not_pass() -> None:
    reference = with_tensor("", None)
    weight = reference[0].tensors["weight/0.weight"].double()
    assert compare(with_tensor("weight/0.weight", weight), reference, NOISE).violation is not None


def test_another_number_of_steps_does_not_pass() -> None:
    violation = compare(records("SGD", 0, steps=2), records("SGD", 0, steps=3), NOISE).violation
    assert violation is not None
    assert violation.cause == "2 and 3 steps were taken"


def test_a_loss_that_differs_in_a_later_step_points_at_the_step_before() -> None:
    ran, reference = records("SGD", 0), records("SGD", 0)
    ran[1] = StepRecord(2, {"loss": 9.0}, ran[1].lrs, ran[1].tensors)
    violation = compare(ran, reference, NOISE).violation
    assert violation is not None
    assert (violation.step, violation.kind, violation.cause) == (2, "loss", "the update of the step before")


def test_integers_must_be_equal() -> None:
    reference = with_tensor("buffer/count", torch.tensor(5))
    violation = compare(with_tensor("buffer/count", torch.tensor(6)), reference, NOISE).violation
    assert violation is not None
    assert (violation.kind, violation.name, violation.largest) == ("buffer", "count", 1.0)


def test_a_difference_reads_as_one_line() -> None:
    violation = compare(with_tensor("buffer/count", torch.tensor(6)), with_tensor("buffer/count", torch.tensor(5)), 0.0).violation
    assert str(violation).startswith("step 1, buffer count: off by 1; likely cause: ")


def test_records_survive_a_folder(tmp_path: Any) -> None:
    ran = records("AdamW", 0)
    for record in ran:
        record.save(tmp_path)
    assert compare(StepRecord.load_all(tmp_path), ran, 0.0).identical
    assert [record.lrs for record in StepRecord.load_all(tmp_path)] == [record.lrs for record in ran]
