"""Nested Python state as JSON with tagged types, and the tensors in it under names of their own: no pickle, no code.

A value that JSON holds exactly stands as it is. Anything else is an object with the key `$`, its kind:
`{"$": "tuple", "items": [1, 2]}`.
"""

from __future__ import annotations

import base64
import collections
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import UsageError

Json: TypeAlias = Any
TAG = "$"
DEEPEST = 200
LARGEST_PLAIN_INT = 2**63
ARRAY_KINDS = "biufcSUmM"
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple, collections.Counter, collections.OrderedDict)
}
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size}


class Encoder:
    """Turns values into JSON and collects their tensors; a tensor that occurs twice is collected once.

    >>> encoder = Encoder()
    >>> encoder.encode({"betas": (0.9, 0.5), "exp_avg": torch.ones(2)}, "adam")
    {'betas': {'$': 'tuple', 'items': [0.9, 0.5]}, 'exp_avg': {'$': 'tensor', 'name': 'adam/exp_avg'}}
    >>> encoder.tensors
    {'adam/exp_avg': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []

    def encode(self, value: Any, path: str) -> Json:
        """Return `value` as JSON.

        Raises:
            UsageError: something in it cannot be stored; the message names it by `path` and what lies below.
        """
        return self._value(value, path, ())

    def _value(self, value: Any, path: str, above: tuple[int, ...]) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < LARGEST_PLAIN_INT else {TAG: "int", "hex": hex(value)}
        if kind is float:
            # JSON has no infinities, and a NaN has a payload.
            finite = value - value == 0
            return value if finite else {TAG: "float", "bits": struct.pack(">d", value).hex()}
        if id(value) in above or len(above) > DEEPEST:
            problem = "contains itself" if id(value) in above else f"is nested deeper than {DEEPEST}"
            raise UsageError(f"{path} {problem}, which a checkpoint cannot hold; return plain nested values from state_dict()")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "base64": base64.b64encode(value).decode()}
        if kind is complex:
            return {TAG: "complex", "bits": struct.pack(">dd", value.real, value.imag).hex()}
        if kind is range:
            return {TAG: "range", "of": [value.start, value.stop, value.step]}
        if kind is torch.dtype or kind is torch.device:
            return {TAG: kind.__name__, "name": str(value).removeprefix("torch.")}
        return self._container(value, path, (*above, id(value)))

    def _container(self, value: Any, path: str, above: tuple[int, ...]) -> Json:
        kind = type(value)
        if kind is list:
            return self._items(value, path, above)
        if kind in (tuple, torch.Size):
            return {TAG: kind.__name__, "items": self._items(value, path, above)}
        if kind in (set, frozenset):
            # Strings hash differently in every process; sorted, equal sets make equal files.
            return {TAG: kind.__name__, "items": sorted(self._items(value, path, above), key=repr)}
        if kind is collections.deque:
            return {TAG: "deque", "items": self._items(value, path, above), "longest": value.maxlen}
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self._dict(value, path, above)
        raise _refusal(value, path)

    def _items(self, values: Iterable[Any], path: str, above: tuple[int, ...]) -> list[Json]:
        return [self._value(inner, f"{path}/{index}", above) for index, inner in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str, above: tuple[int, ...]) -> Json:
        kind = type(value)
        if kind is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self._value(inner, f"{path}/{key}", above) for key, inner in value.items()}
        encoded: dict[str, Json] = {TAG: kind.__name__}
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            factory = getattr(value.default_factory, "__name__", "")
            if FACTORIES.get(factory) is not value.default_factory:
                raise UsageError(
                    f"{path} is a defaultdict that makes its values with {value.default_factory!r}, which a checkpoint cannot "
                    f"hold; use one of {', '.join(FACTORIES)}, or return dict(...) from state_dict()"
                )
            encoded["factory"] = factory
        encoded["items"] = [
            [self._value(key, f"{path} key {key!r}", above), self._value(inner, f"{path}/{key}", above)]
            for key, inner in value.items()
        ]
        return encoded

    def _tensor(self, value: Tensor, path: str) -> Json:
        check_storable(value, path)
        return {TAG: "tensor", "name": self._collect(value, path)}

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> Json:
        if value.dtype.kind not in ARRAY_KINDS:
            raise UsageError(
                f"{path} is a numpy value of dtype {value.dtype}, which a checkpoint cannot hold; make it a list or numbers"
            )
        dtype = value.dtype.str
        if isinstance(value, np.generic):
            return {TAG: "numpy", "dtype": dtype, "bytes": value.tobytes().hex()}
        if type(value) is not np.ndarray:
            raise _refusal(value, path)
        order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        data = (
            torch.from_numpy(np.frombuffer(bytearray(value.tobytes(order)), dtype=np.uint8))
            if value.nbytes
            else torch.empty(0).byte()
        )
        return {TAG: "ndarray", "dtype": dtype, "shape": list(value.shape), "order": order, "name": self._collect(data, path)}

    def _collect(self, tensor: Tensor, path: str) -> str:
        if id(tensor) in self._names:
            return self._names[id(tensor)]
        name, number = path, 2
        while name in self.tensors:
            name, number = f"{path}~{number}", number + 1
        self.tensors[name] = tensor
        self._names[id(tensor)] = name
        self._kept.append(tensor)  # an identity is one only while its object lives
        return name


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `Encoder.encode` was given.

    Raises:
        KeyError, TypeError, ValueError: this is not what `encode` returns, or a tensor is missing.

    >>> decode({"$": "dict", "items": [[1, {"$": "frozenset", "items": [2]}]]}, {})
    {1: frozenset({2})}
    """
    if isinstance(value, list):
        return [decode(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(inner, tensors) for key, inner in value.items()}
    kind = value[TAG]
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(value["items"], tensors))
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return _decode_dict(value, tensors)
    if kind == "deque":
        return collections.deque(decode(value["items"], tensors), value["longest"])
    if kind == "tensor":
        return tensors[value["name"]]
    if kind == "ndarray":
        data = bytearray(tensors[value["name"]].numpy().tobytes())
        _check_array(value)
        return np.ndarray(tuple(value["shape"]), np.dtype(value["dtype"]), data, order=value["order"])
    return _decode_scalar(kind, value)


def _decode_dict(value: dict[str, Json], tensors: Mapping[str, Tensor]) -> Any:
    items = [(decode(key, tensors), decode(inner, tensors)) for key, inner in value["items"]]
    if value[TAG] == "defaultdict":
        return collections.defaultdict(FACTORIES[value["factory"]] if "factory" in value else None, items)
    if value[TAG] == "OrderedDict":
        return collections.OrderedDict(items)
    return collections.Counter(dict(items)) if value[TAG] == "Counter" else dict(items)


def _decode_scalar(kind: str, value: dict[str, Json]) -> Any:
    match kind:
        case "int":
            return int(value["hex"], 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(value["bits"]))[0]
        case "complex":
            return complex(*struct.unpack(">dd", bytes.fromhex(value["bits"])))
        case "bytes":
            return base64.b64decode(value["base64"], validate=True)
        case "bytearray":
            return bytearray(base64.b64decode(value["base64"], validate=True))
        case "range":
            return range(*value["of"])
        case "dtype":
            return DTYPES[value["name"]]
        case "device":
            return torch.device(value["name"])
        case "numpy":
            _check_array(value)
            return np.ndarray((), np.dtype(value["dtype"]), bytearray.fromhex(value["bytes"]))[()]
    raise ValueError(f"unknown kind {kind!r}")


def _check_array(value: dict[str, Json]) -> None:
    """Refuse a dtype that `encode` never writes: an array of objects over bytes of a file would be pointers from the file."""
    if np.dtype(value["dtype"]).kind not in ARRAY_KINDS:
        raise ValueError(f"dtype {value['dtype']!r}")


def check_storable(tensor: Tensor, path: str) -> None:
    """Raise `UsageError` for a tensor whose values are not all there is to it."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        problem = f"is a {type(tensor).__name__}, a subclass of Tensor"
    elif tensor.layout != torch.strided:
        problem = f"has the layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = "is quantized"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values"
    else:
        return
    raise UsageError(f"{path} {problem}, which a checkpoint cannot hold; make it a plain dense tensor")


def _refusal(value: Any, path: str) -> UsageError:
    what = (
        "a function"
        if callable(value) and hasattr(value, "__qualname__")
        else f"a {type(value).__module__}.{type(value).__qualname__}"
    )
    return UsageError(
        f"{path} is {what} ({value!r:.80}), which a checkpoint cannot hold; keep it out of state_dict(), or return numbers, text, "
        "tensors, arrays and the built-in containers, from which load_state_dict() makes it again"
    )
