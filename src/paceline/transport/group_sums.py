"""Sums over a process group whose ranks have already agreed on the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.transport.base import Order
from paceline.transport.calls import bounds, evaluate, leaves

# What gloo and NCCL both add up; anything else is added here, where every dtype has an addition.
NATIVE_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8}
)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, which every backend moves whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def add_up(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Make a flat `out` the sum of this rank's own flat parts; it may be one of them."""
    if not parts:
        out.zero_()
        return
    own = [index for index, part in enumerate(parts) if part.data_ptr() == out.data_ptr()]
    if not own:
        out.copy_(parts[0])
    for index, part in enumerate(parts):
        if index != (own[0] if own else 0):
            out += part


def any_order(out: Tensor, owner: int | None, group: dist.ProcessGroup) -> None:
    """Sum every rank's contiguous `out` into everyone's, or the owner's."""
    if owner is None:
        dist.all_reduce(out, group=group)
    else:
        dist.reduce(out, group_dst=owner, group=group)


def fixed_order(out: Tensor, parts: Sequence[Tensor], owner: int | None, order: Order, group: dist.ProcessGroup) -> None:
    """Sum contiguous flat `parts` into a flat `out` with the additions of `order`.

    Every rank adds one slice of the elements up: it gets that slice of all parts, and hands the sum to all, or to the owner.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    slices = [slice(*edges) for edges in bounds(out.numel(), size)]
    mine = slices[rank]
    got: dict[tuple[int, int], Tensor] = {}
    moves = []
    for source, part in sorted(leaves(order)):
        if source != rank:
            got[source, part] = torch.empty_like(out[mine])
            moves.append(_move(dist.irecv, got[source, part], source, group))
        else:
            got[source, part] = parts[part][mine]
            moves += [_move(dist.isend, parts[part][slices[peer]], peer, group) for peer in range(size) if peer != rank]
    _carry_out(moves)
    rooms: dict[int, Tensor] = {}

    def room(depth: int) -> Tensor:
        if depth not in rooms:
            rooms[depth] = torch.empty_like(out[mine])
        return rooms[depth]

    total = evaluate(order, lambda source, part: got[source, part], room)
    keepers = range(size) if owner is None else [owner]
    moves = [_move(dist.isend, total, peer, group) for peer in keepers if peer != rank]
    if rank in keepers:
        moves += [_move(dist.irecv, out[slices[peer]], peer, group) for peer in range(size) if peer != rank]
        out[mine].copy_(total)
    _carry_out(moves)


def _move(how: Callable[..., Any], tensor: Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp | None:
    if not tensor.numel():
        return None
    return dist.P2POp(how, bytes_of(tensor), group=group, group_peer=peer)


def _carry_out(moves: Sequence[dist.P2POp | None]) -> None:
    wanted = [move for move in moves if move is not None]
    if wanted:
        for work in dist.batch_isend_irecv(wanted):
            work.wait()
