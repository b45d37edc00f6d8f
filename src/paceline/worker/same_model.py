"""The check that all ranks start from one model: names, shapes, dtypes, order and values."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

import torch
from torch import Tensor, nn

from paceline.errors import MismatchError
from paceline.transport.base import Transport

Entry = tuple[str, tuple[int, ...], str, bool, str]  # name, shape, dtype, requires a gradient, hash


def check_same_model(model: nn.Module, transport: Transport, *, values: bool = True) -> None:
    """Raise `MismatchError` on every rank where one rank's model is not rank 0's, `values` included or not. Collective."""
    gathered: list[list[Entry]] = transport.gather_objects(_entries(model, values))
    for rank, entries in enumerate(gathered):
        for reference, entry in zip_longest(gathered[0], entries):
            if reference != entry:
                raise MismatchError(
                    f"rank {rank}'s model is not rank 0's: rank 0 has {_describe(reference, entry)}, rank {rank} has "
                    f"{_describe(entry, reference)} ({len(gathered[0])} and {len(entries)} tensors in all); "
                    "build the same model on every rank: pass Job(model=function), or call torch.manual_seed(0) before building it"
                )


def _entries(model: nn.Module, values: bool) -> list[Entry]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad, _hash(t) if values else "")
        for name, t in tensors
    ]


def _hash(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def _describe(entry: Entry | None, other: Entry | None) -> str:
    if entry is None:
        return "nothing more"
    name, shape, dtype, requires_grad, values = entry
    words = f"{name!r} ({dtype}{list(shape)})"
    if other is not None and other[:3] == entry[:3]:
        words += f" {'trained' if requires_grad else 'frozen'}" if requires_grad != other[3] else f" with values of hash {values}"
    return words
