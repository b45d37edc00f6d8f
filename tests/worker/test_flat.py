"""Gradients in one flat tensor: aligned, strided as their parameters, with flags behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.worker.flat import FlatLayout, buckets_of


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_gradient_starts_at_a_64_byte_boundary(dtype: torch.dtype) -> None:
    layout = FlatLayout([parameter(*shape, dtype=dtype) for shape in ((3,), (), (5, 7), (16,), (0,), (1,))])
    flat = layout.new()
    for view in layout.views(flat):
        assert view.storage_offset() * dtype.itemsize % 64 == 0


def test_gradients_and_flags_do_not_overlap_and_cover_no_more() -> None:
    parameters = [parameter(3), parameter(5, 7), parameter(1)]
    layout = FlatLayout(parameters)
    flat = layout.new()
    for number, view in enumerate(layout.views(flat), start=1):
        view.fill_(number)
    layout.flags(flat).fill_(9)
    for number, view in enumerate(layout.views(flat), start=1):
        assert bool((view == number).all())
    assert layout.flags(flat).tolist() == [9.0] * 3
    assert flat.numel() == layout.size
    assert int((flat != 0).sum()) == 3 + 35 + 1 + 3


def test_strides_are_those_of_the_parameter_where_it_is_dense() -> None:
    last = nn.Parameter(torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.empty(3, 4).T)
    layout = FlatLayout([last, turned])
    assert [view.stride() for view in layout.views(layout.new())] == [last.stride(), turned.stride()]


def test_a_parameter_with_gaps_gets_a_contiguous_gradient() -> None:
    gaps = nn.Parameter(torch.empty(4, 8)[:, ::2])
    (view,) = FlatLayout([gaps]).views(FlatLayout([gaps]).new())
    assert view.is_contiguous()
    assert view.shape == gaps.shape


def test_a_view_of_a_part_of_a_larger_flat_tensor_lies_there() -> None:
    layout = FlatLayout([parameter(3)])
    large = torch.zeros(2 * layout.size)
    layout.views(large[layout.size :])[0].fill_(1)
    assert large[: layout.size].sum() == 0
    assert large.sum() == 3


def test_buckets_keep_the_order_and_hold_one_dtype_each() -> None:
    a, b, c, d = parameter(2), parameter(2, dtype=torch.float64), parameter(3), parameter(4, dtype=torch.float64)
    assert [[id(p) for p in bucket] for bucket in buckets_of([a, b, c, d])] == [[id(a), id(c)], [id(b), id(d)]]


def test_a_full_bucket_opens_the_next() -> None:
    parameters = [parameter(4) for _ in range(5)]
    assert [len(bucket) for bucket in buckets_of(parameters, bucket_bytes=33)] == [2, 2, 1]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own() -> None:
    parameters = [parameter(1), parameter(100), parameter(1)]
    assert [len(bucket) for bucket in buckets_of(parameters, bucket_bytes=16)] == [1, 1, 1]
