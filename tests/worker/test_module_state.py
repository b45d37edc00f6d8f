"""Merging the values that micro-batches left in a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.worker.module_state import folds, merge

BEFORE = torch.tensor([1.0, 10.0])
VALUES = [torch.tensor([2.0, 7.0]), torch.tensor([5.0, 11.0])]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("sum", [6.0, 8.0]), ("mean", [3.5, 9.0]), ("max", [5.0, 11.0]), ("min", [2.0, 7.0]), ("last", [5.0, 11.0])],
)
def test_a_rule_merges_the_values(rule: Any, expected: list[float]) -> None:
    assert merge(rule, BEFORE, VALUES).tolist() == expected


def test_a_function_is_given_what_was_and_the_values_in_order() -> None:
    assert merge(lambda before, values: before + values[0] - values[1], BEFORE, VALUES).tolist() == [-2.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", ["sum", "mean", "max", "min", "last"])
def test_a_rule_keeps_the_dtype(rule: Any, dtype: torch.dtype) -> None:
    assert merge(rule, BEFORE.to(dtype), [value.to(dtype) for value in VALUES]).dtype == dtype


def test_a_sum_of_one_value_is_that_value() -> None:
    assert torch.equal(merge("sum", BEFORE, VALUES[:1]), VALUES[0])


def test_batch_norms_of_torch_are_folded_and_others_are_not() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    assert all(folds(kind(2)) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert not folds(Own(2))
    assert not folds(nn.InstanceNorm1d(2, track_running_stats=True))
    assert not folds(nn.BatchNorm1d(2, track_running_stats=False))
