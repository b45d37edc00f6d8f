"""Nested state: what goes in comes out, to the last bit and the last type, or is refused by name."""

from __future__ import annotations

import collections
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline.checkpoint.encoding import Encoder, decode
from paceline.errors import UsageError
from tests.checkpoint.states import same

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**18, max_value=10**30)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), range(1, 9, 2)]
    )
    | st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01"), bytearray(b"ab")])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("$")
TENSORS = st.builds(
    lambda dtype, shape: torch.arange(int(np.prod(shape))).to(dtype).reshape(shape),
    st.sampled_from([torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.uint16, torch.complex64]),
    st.sampled_from([(), (0,), (3,), (2, 3), (0, 4)]),
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.float32, np.dtype(">i4"), np.complex128, np.bool_, np.dtype("<U3")]), st.sampled_from([(), (0,), (2, 3)])
)
NESTED = st.recursive(
    SCALARS | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 5))
        | st.sets(st.integers() | st.text(), max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.dictionaries(st.text(), st.integers(), max_size=3).map(collections.Counter)
        | st.dictionaries(st.integers(), inner, max_size=3).map(lambda items: collections.defaultdict(list, items))
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "it"), allow_nan=False)
    return decode(json.loads(text), encoder.tensors)


@settings(max_examples=80, deadline=None)
@given(NESTED)
def test_any_nested_value_comes_back(value: Any) -> None:
    """Types, order, bits: nothing changes on the way through JSON and tensors."""
    assert same(there_and_back(value), value)


def test_special_values_come_back() -> None:
    """A NaN keeps its payload, zero its sign, an int all its digits, an array its order in memory."""
    assert str(there_and_back(-0.0)) == "-0.0"
    payload = np.frombuffer(bytes.fromhex("010000000000f87f"), "<f8")[0].item()
    assert same(there_and_back(payload), payload)
    assert there_and_back(7**9000) == 7**9000
    assert there_and_back(np.asfortranarray(np.ones((2, 3)))).flags.f_contiguous
    again = there_and_back(collections.deque([1], maxlen=2))
    assert again.maxlen == 2


def test_one_tensor_at_two_places_stays_one() -> None:
    """What was shared is shared again, and stored once."""
    shared = torch.ones(3)
    again = there_and_back({"a": shared, "b": [shared]})
    assert again["a"] is again["b"][0]


def test_names_of_tensors_do_not_collide() -> None:
    """Two paths that read alike are two tensors."""
    value = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert same(there_and_back(value), value)


class Own:
    """A class of the user's."""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda x: x, "a function"),
        (Own(), "Own"),
        (threading.Lock(), "lock"),
        (np.array([None]), "dtype object"),
        (torch.zeros(2, 2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "meta device"),
        (collections.defaultdict(lambda: 0), "defaultdict"),
        (torch.Generator(), "Generator"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(value: Any, says: str) -> None:
    """The message names the place, the value and a way out."""
    with pytest.raises(UsageError, match=rf"objects/mine/list/1\b.*{says}.*; (keep|make|use)"):
        Encoder().encode({"mine": {"list": [0, value]}}, "objects")


def test_cycles_are_refused() -> None:
    """A value that contains itself ends in a message, not in a recursion error."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="objects/0 contains itself"):
        Encoder().encode(value, "objects")
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="nested deeper"):
        Encoder().encode(deep, "objects")


def test_arrays_of_objects_cannot_come_from_a_file() -> None:
    """A forged file cannot make Python follow pointers that it contains."""
    for forged in (
        {"$": "ndarray", "dtype": "|O", "shape": [1], "order": "C", "name": "x"},
        {"$": "numpy", "dtype": "|O", "bytes": "00" * 8},
    ):
        with pytest.raises((ValueError, TypeError)):
            decode(forged, {"x": torch.zeros(8, dtype=torch.uint8)})
