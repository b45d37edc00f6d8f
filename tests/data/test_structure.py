"""Cutting and joining batches, and looking into them."""

import collections
import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from paceline.data import concatenate, count_rows, count_valid, cut, digest, even_sizes, find_value, pin, split_batch, to_device
from paceline.data.order import Position
from paceline.errors import UsageError

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str = "all"


class Encoding(UserDict):
    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data)


class Stubborn(collections.abc.Mapping):
    """A mapping that cannot be made from one."""

    def __init__(self, one: int, two: int) -> None:
        self.inner = {"x": torch.arange(4)}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.inner[key]

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return 1


def rows_of(count: int) -> torch.Tensor:
    return torch.arange(count * 3.0).reshape(count, 3)


@given(st.integers(0, 200), st.integers(1, 30))
def test_even_sizes_sum_up_and_the_larger_come_first(total: int, parts: int) -> None:
    sizes = even_sizes(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def leaf(rows: int) -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [
            rows_of(rows),
            torch.arange(rows, dtype=torch.int32),
            rows_of(rows).to(torch.bfloat16),
            rows_of(rows).t().contiguous().t(),
            np.arange(rows * 2).reshape(rows, 2),
            [f"row {row}" for row in range(rows)],
            [torch.ones(row % 3 + 4) for row in range(rows)],
        ]
    )


def structure(rows: int) -> st.SearchStrategy[Any]:
    inner = st.recursive(
        leaf(rows),
        lambda child: st.one_of(
            st.dictionaries(st.sampled_from("abc"), child, min_size=1),
            st.tuples(child, child),
            st.builds(Pair, child, child),
            st.builds(Encoding, st.fixed_dictionaries({"e": child})),
        ),
        max_leaves=6,
    )
    return st.tuples(st.just(rows_of(rows)), inner)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_concatenating_what_was_split_gives_the_batch_back(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 20))
    batch = data.draw(structure(rows))
    sizes = even_sizes(rows, data.draw(st.integers(1, 6)))
    parts = split_batch(batch, sizes)
    assert [count_rows(part) for part, size in zip(parts, sizes, strict=True) if size > 1] == [size for size in sizes if size > 1]
    joined = concatenate([part for part, size in zip(parts, sizes, strict=True) if size], [size for size in sizes if size])
    assert digest(joined) == digest(batch)
    assert type(joined[1]) is type(batch[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9))
def test_pieces_are_aligned_and_contiguous(rows: int, parts: int) -> None:
    batch = (rows_of(rows), rows_of(rows).numpy(), torch.ones(rows, 5).t().contiguous().t())
    for piece in split_batch(batch, even_sizes(rows, parts)):
        assert piece[0].data_ptr() % 64 == piece[2].data_ptr() % 64 == 0
        assert piece[0].is_contiguous()
        assert piece[2].is_contiguous()
        assert not piece[1].size or piece[1].ctypes.data % 64 == 0


def test_channels_last_stays() -> None:
    images = torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)
    for piece in split_batch(images, (3, 2)):
        assert piece.is_contiguous(memory_format=torch.channels_last)


def test_a_micro_batch_changed_in_place_does_not_spoil_the_backward_of_another() -> None:
    first, second = split_batch(torch.ones(32, 16), (16, 16))
    weight = torch.ones(16, requires_grad=True)
    loss = (second * weight).sum()
    first.mul_(2)
    loss.backward()
    assert weight.grad is not None


def test_values_without_rows_are_given_whole() -> None:
    batch = {"x": rows_of(4), "scale": torch.tensor(2.0), "name": "n", "flag": True, "none": None, "shape": (3, 4)}
    for piece in split_batch(batch, (2, 2)):
        assert {key: piece[key] for key in batch if key != "x"} == {key: batch[key] for key in batch if key != "x"}


def test_types_are_kept_where_they_can_be_made() -> None:
    x = rows_of(4)
    for batch in (Pair(x, x), Example(x), Encoding({"x": x}), OrderedDict(x=x), collections.defaultdict(list, x=x), Stubborn(1, 2)):
        piece = split_batch(batch, (3, 1))[1]
        expected = dict if type(batch) in (collections.defaultdict, Stubborn) else type(batch)
        assert type(piece) is expected
        assert count_rows(piece) == 1


def test_split_gives_other_dimensions_and_whole_leaves() -> None:
    batch = {"x": rows_of(4), "inner": {"states": torch.zeros(2, 4, 5), "mask": torch.ones(9, 9)}}
    parts = split_batch(batch, (3, 1), {"inner.states": 1, "inner.mask": None})
    assert [tuple(part["inner"]["states"].shape) for part in parts] == [(2, 3, 5), (2, 1, 5)]
    assert parts[0]["inner"]["states"].is_contiguous()
    assert parts[1]["inner"]["mask"] is batch["inner"]["mask"]
    assert count_rows({"texts": ["a", "b"]}, {"texts": 0}) == 2
    images = (torch.zeros(3, 8, 9), torch.zeros(3, 7, 7))
    assert [len(part[0]) for part in split_batch((images, rows_of(2)), (1, 1), {"0": 0})] == [1, 1]


def test_lists_of_targets_are_cut_by_row() -> None:
    targets = [{"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)} for count in (2, 0, 5)]
    for batch in (
        {"images": torch.zeros(3, 3, 8, 8), "targets": targets},
        {"images": [torch.zeros(3, 8, side) for side in (4, 5, 6)], "targets": [*targets[:2], targets[2]]},
    ):
        if isinstance(batch["images"], list):  # three images of three channels are three rows either way
            with pytest.raises(UsageError, match="can be read in two ways"):
                split_batch(batch, (2, 1))
            parts = split_batch(batch, (2, 1), {"images": 0})
        else:
            parts = split_batch(batch, (2, 1))
        assert [len(part["targets"]) for part in parts] == [2, 1]
        assert parts[1]["targets"][0] is targets[2]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_lists_of_the_default_collate_are_containers(rows: int) -> None:
    batch = default_collate([(torch.ones(3) * row, row) for row in range(rows)])
    assert isinstance(batch, list)
    assert count_rows(batch) == rows
    assert [part[1].tolist() for part in split_batch(batch, even_sizes(rows, 2))] == [
        list(range(even_sizes(rows, 2)[0])),
        list(range(even_sizes(rows, 2)[0], rows)),
    ]


@pytest.mark.parametrize(
    ("batch", "split", "message"),
    [
        ({"x": rows_of(4), "y": rows_of(3)}, {}, r"disagree about the number of rows \(x: 4, y: 3\).*split="),
        ({"x": rows_of(4), "names": ["a", "b"]}, {}, r"disagree .*in a batch of 4 rows \('names': 2\)"),
        ({"x": rows_of(4)}, {"z": 0}, r"'z', which is not in the batch: its leaves are 'x'"),
        ({"x": rows_of(4)}, {"x": 2}, r"dimension 2 for 'x': allowed are \[-2, -1, 0, 1\]"),
        ({"x": rows_of(4), "n": 3}, {"n": 0}, r"'n', a int: only tensors"),
        ({"n": 3, "texts": ["a"]}, {}, r"no tensor with rows in it \(it holds n: int"),
        ({}, {}, r"no tensor with rows in it \(it holds nothing\)"),
        ({"x": rows_of(2), "ys": [rows_of(2), rows_of(2)]}, {}, r"'ys' is a list of 2 in a batch of 2 rows .*'ys': 0.*'ys.0': 0"),
        ([{"x": rows_of(3)}] * 4, {}, r"can be read as having 3 or 4 rows"),
        ({"x": rows_of(2), "y": object()}, {}, r"'y' is a object, which cannot be cut"),
        ({"x": rows_of(2).to_sparse()}, {}, r"layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_told_is_refused(batch: Any, split: dict[str, int | None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_batch(batch, (1, 1), split)


def test_sizes_must_sum_to_the_rows() -> None:
    with pytest.raises(UsageError, match=r"sizes \(1, 1\) were given for a batch of 4 rows"):
        split_batch(rows_of(4), (1, 1))


def test_cut_gives_the_owned_micro_batches_only() -> None:
    local = cut({"x": rows_of(3)}, 4, range(2, 4), Position(1, 5))
    assert local.sizes == (1, 1, 1, 0)
    assert local.rows == 3
    assert list(local.micro_batches) == [2]
    with pytest.raises(UsageError, match="allowed are numbers from 0 to 1"):
        cut(rows_of(3), 2, range(1, 3), Position())


def test_digests_tell_batches_apart() -> None:
    x = rows_of(4)
    batches = [
        {"x": x},
        {"y": x},
        {"x": x + 1},
        {"x": x.double()},
        {"x": x.bfloat16()},
        {"x": x.reshape(2, 6)},
        {"x": x.numpy()},
        (x,),
        [x],
        {"x": x, "n": 1},
        {"x": x, "n": 2},
        {"x": x, "s": {"a", "b"}},
        Example(x),
        Example(x, "b"),
        None,
    ]
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest({"x": x.t().contiguous().t()}) == digest({"x": x})
    assert digest(torch.zeros(0, 3)) != digest(torch.zeros(0, 2))


def test_find_value_knows_the_range_of_a_dtype() -> None:
    assert find_value({"x": torch.tensor([156], dtype=torch.uint8)}, -100) is None
    assert find_value({"x": torch.tensor([-100.0]), "b": torch.tensor([True])}, -100) is None
    assert find_value({"x": rows_of(2), "y": (torch.tensor([1, -100]),)}, -100) == "y.0"
    assert find_value({"y": np.array([-100])}, -100) == "y"


def test_count_valid() -> None:
    labels = torch.tensor([[-100, 2, 3], [4, -100, -100]])
    assert count_valid()({"labels": labels}) == 3
    assert count_valid(shift=1)({"labels": labels}) == 2
    assert count_valid("x")(Example(labels)) == 3
    assert count_valid("1.y")((0, {"y": labels.numpy()})) == 3
    with pytest.raises(UsageError, match="no tensor or array: its tensors and arrays are 'targets'"):
        count_valid()({"targets": labels})
    with pytest.raises(UsageError, match="shift=-1"):
        count_valid(shift=-1)


def test_moving_keeps_the_structure() -> None:
    batch = {"x": rows_of(2), "e": Encoding({"y": rows_of(2)}), "n": np.ones(2), "s": "s", "p": Pair(rows_of(2), None)}
    moved = to_device(batch, "meta")
    assert moved["x"].is_meta
    assert moved["e"]["y"].is_meta
    assert type(moved["e"]) is Encoding
    assert moved["p"].x.is_meta
    assert moved["n"] is batch["n"]
    assert digest(pin(batch)) == digest(batch)


def test_outputs_of_hugging_face_are_joined_and_cut() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    parts = [
        outputs.CausalLMOutput(loss=torch.tensor(float(rows)), logits=rows_of(rows), hidden_states=(rows_of(rows),))
        for rows in (2, 3)
    ]
    joined = concatenate(parts)
    assert joined["loss"].tolist() == [2.0, 3.0]
    assert joined["logits"].shape == (5, 3)
    assert joined["hidden_states"][0].shape == (5, 3)
    assert type(joined) is type(parts[0])
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.ones(4, 2, dtype=torch.long)})
    piece = split_batch(encoding, (3, 1))[1]
    assert type(piece) is type(encoding)
    assert piece["input_ids"].shape == (1, 2)


def test_joining_numbers_and_lists() -> None:
    joined = concatenate(
        [{"y": rows_of(2), "n": 1, "t": ["a", "b"], "none": None}, {"y": rows_of(1), "n": 2.5, "t": ["c"], "none": None}]
    )
    assert joined["n"] == [1, 2.5]
    assert joined["t"] == ["a", "b", "c"]
    assert joined["none"] is None
    assert [tensor.shape[0] for tensor in concatenate([[rows_of(2), rows_of(2)], [rows_of(3), rows_of(3)]])] == [5, 5]
    assert len(concatenate([[rows_of(2), rows_of(4)], [rows_of(3)]])) == 3


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no parts"),
        ([rows_of(2), None], "of types NoneType, tensor"),
        ([{"a": 1}, {"b": 1}], r"hold \['a'\] and \['b'\]"),
        ([torch.ones(2, 3), torch.ones(2, 4)], r"have shapes \[\(2, 3\), \(2, 4\)\]"),
        ([{"y": rows_of(2), "l": [rows_of(2), rows_of(2)]}] * 2, "one entry per row or a container"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        concatenate(parts)
