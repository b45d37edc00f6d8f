"""Tensors into safetensors files: what is stored once, what goes into which shard, and the bytes themselves.

Files are read with the safetensors package. They are written here, because a checksum is then taken while the bytes pass
(one trip through memory, no copy), tensors of a GPU are fetched one at a time, and a full disk is told as what it is.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.checksums import as_text, bytes_of, checksum, in_threads
from paceline.checkpoint.encoding import check_storable
from paceline.checkpoint.state import view_key
from paceline.errors import UsageError

ALIASES, METADATA = "paceline.aliases", "__metadata__"
INDEX = "model.safetensors.index.json"
# Small enough that what was just checked is written from the cache.
PIECE = 2**20
# Data starts at a cache line, so that mapped tensors are as aligned as allocated ones, as far as their sizes allow.
ALIGNMENT = 64
STORED: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its dtype and shape, and the checksum of its bytes.

    Dtypes that safetensors does not know lie there as flat bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str


@dataclass(frozen=True)
class Written:
    """One safetensors file: its size, the checksum of its header, and its tensors."""

    size: int
    header: str
    tensors: dict[str, Stored]


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def size_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor's elements take."""
    return tensor.numel() * tensor.element_size()


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct tensors by their first name, and for every further name the first one.

    >>> w = torch.ones(2)
    >>> untie({"embed.weight": w, "head.weight": w})
    ({'embed.weight': tensor([1., 1.])}, {'head.weight': 'embed.weight'})
    """
    first: dict[tuple[Any, ...], str] = {}
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        check_storable(tensor, name)
        if name == METADATA:
            raise UsageError(f"a tensor is called {METADATA}, a name that safetensors files keep for themselves; rename it")
        known = first.setdefault(view_key(tensor), name)
        if known == name:
            distinct[name] = tensor
        else:
            aliases[name] = known
    return distinct, aliases


def shard(tensors: Mapping[str, Tensor], stem: str, shard_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Return which tensors go into which file, in order: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on.

    >>> list(shard({"a": torch.zeros(2), "b": torch.zeros(2)}, "model", 8))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + size_of(tensor) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size_of(tensor)
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": part for number, part in enumerate(shards, 1)}


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Written:
    """Write one safetensors file, through to the disk, and return what to check it by.

    Raises:
        OSError: it cannot be written; what there is of it is left for the caller to remove.
    """
    # Wide elements first: then each tensor starts at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    described: dict[str, Any] = {METADATA: dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        size = size_of(tensor)
        plain = tensor.dtype in STORED
        described[name] = {
            "dtype": STORED.get(tensor.dtype, "U8"),
            "shape": list(tensor.shape) if plain else [size],
            "data_offsets": [end, end + size],
        }
        starts[name] = end
        end += size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_at(file, memoryview(header), 0)
        largest_first = sorted(order, key=lambda name: -size_of(tensors[name]))
        crcs = in_threads(lambda name: _write_tensor(file, tensors[name], len(header) + starts[name]), largest_first)
        os.fsync(file)
    finally:
        os.close(file)
    of = dict(zip(largest_first, crcs, strict=True))
    stored = {name: Stored(dtype_name(tensors[name].dtype), tuple(tensors[name].shape), of[name]) for name in order}
    return Written(len(header) + end, checksum(header), stored)


def _write_tensor(file: int, tensor: Tensor, start: int) -> str:
    # A tensor that is conjugated or negated lazily holds other bytes than it means.
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    data = bytes_of(plain)
    crc = 0
    for begin in range(0, len(data), PIECE):
        piece = data[begin : begin + PIECE]
        crc = zlib.crc32(piece, crc)
        _write_at(file, piece, start + begin)
    return as_text(crc)


def _write_at(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def write_text(path: Path, text: str) -> tuple[int, str]:
    """Write a text through to the disk and return its size in bytes and its checksum."""
    data = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_at(file, memoryview(data), 0)
        os.fsync(file)
    finally:
        os.close(file)
    return len(data), checksum(data)


def index_text(shards: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return the index of several shards as Hugging Face writes it."""
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(size_of(tensor) for tensors in shards.values() for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
