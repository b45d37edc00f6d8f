"""The forms that a loss function may return."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.worker.losses import ALLOWED, LossValue

ONE = torch.tensor(1.5, requires_grad=True)


def test_a_mean_counts_its_rows() -> None:
    value = LossValue.read(ONE, 4, None)
    assert (float(value.total), value.count, value.is_sum, value.by_rows) == (6.0, 4, False, True)


def test_a_mean_with_the_jobs_count_counts_that() -> None:
    value = LossValue.read(ONE, 4, 10.0)
    assert (float(value.total), value.count, value.by_rows) == (15.0, 10.0, False)


@pytest.mark.parametrize("count", [8, 8.0, torch.tensor(8), torch.tensor([8.0], requires_grad=True)])
def test_a_sum_with_its_count_is_a_sum(count: Any) -> None:
    value = LossValue.read((ONE, count), 4, None)
    assert (float(value.total), float(value.count), value.is_sum, value.by_rows) == (1.5, 8.0, True, False)


def test_extras_go_with_either() -> None:
    assert LossValue.read((ONE, {"a": 2}), 4, None).extras == {"a": 2}
    with_count = LossValue.read((ONE, 8, {"b": torch.ones(1)}), 4, None)
    assert (with_count.is_sum, list(with_count.extras)) == (True, ["b"])


def test_numbers_are_total_count_and_extras_by_name_times_the_count() -> None:
    numbers = LossValue.read((ONE, {"z": 1.0, "a": torch.tensor([3.0])}), 4, None).numbers()
    assert numbers.tolist() == [6.0, 4.0, 12.0, 4.0]
    assert numbers.dtype == torch.float64
    assert not numbers.requires_grad


def test_a_mean_over_nothing_is_a_total_of_0() -> None:
    assert float(LossValue.read(torch.tensor(float("nan")), 4, 0.0).total) == 0.0


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (None, "NoneType"),
        (1.5, "float"),
        (torch.ones(2), "a tensor of shape (2,)"),
        ([ONE], "list"),
        ((), "()"),
        ((ONE, 1, 2), "(a tensor of shape (), int, int)"),
        ((ONE, "8"), "(a tensor of shape (), str)"),
        ({"loss": ONE}, "dict"),
    ],
)
def test_any_other_form_is_refused_with_what_is_allowed(result: Any, word: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"loss returned {word}; return {ALLOWED}")):
        LossValue.read(result, 4, None)


def test_an_extra_that_is_no_scalar_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"loss returned the extra 'map' as a tensor of shape \(3,\); extras are scalars"):
        LossValue.read((ONE, {"map": torch.ones(3)}), 4, None)


def test_two_counts_are_refused() -> None:
    with pytest.raises(UsageError, match="d returned a sum with its count, and the job has count= too; leave one of them out"):
        LossValue.read((ONE, 3), 4, 5.0, "d")
