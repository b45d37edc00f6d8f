"""Workers that are processes, on one host or many, over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

The ranks agree on every call before its data moves (`exchange`); data then moves on one thread, in the order of the calls, so
that it overlaps with computation. What is small goes along with the agreement, and gloo is not asked at all.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.errors import DeadlineError, Failure, UsageError
from paceline.transport.base import Order, Transport, Work
from paceline.transport.calls import Call, by_rank, check_order, check_rank, describe, evaluate, peer_error, sum_call
from paceline.transport.data_thread import Brought, CallWork, DataThread
from paceline.transport.environment import Environment
from paceline.transport.exchange import Board, Exchange
from paceline.transport.group_sums import NATIVE_DTYPES, add_up, any_order, bytes_of, fixed_order
from paceline.transport.messages import Messages
from paceline.transport.wire import Wire

# Up to here a tensor goes along with the call: a round of messages takes a tenth of the time of gloo's smallest operation.
_SMALL_BYTES = 8192
# Processes of one run start seconds apart, however short the waits between them are to be later.
_LEAST_JOIN_S = 60.0


class TorchDistributedTransport(Transport):
    """One process's end of a group of all processes that torch.distributed knows.

    It joins the default process group where there is one, and else makes it from the variables that torchrun sets
    (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE). Its data moves in groups of its own, so a program's own collectives may
    go on beside it. Every rank must make it at the same point among the program's calls of `new_group`.

    Args:
        timeout_s: The bound of every wait, in seconds.
        device: This rank's device. With a CUDA device NCCL is used as well; give each rank another one.
        environment: Where the process stands, as whatever started it says; where not given, torchrun's variables.
        join_timeout_s: How long to wait for the others to start, in seconds; where not given `timeout_s`, and at least a minute.

    Raises:
        UsageError: There is neither a default process group nor the variables to make one.
        DeadlineError: Not all ranks came within `join_timeout_s`.
    """

    name = "torch_distributed"

    def __init__(
        self,
        timeout_s: float = 600.0,
        device: torch.device | str = "cpu",
        *,
        join_timeout_s: float | None = None,
        environment: Environment | None = None,
    ) -> None:
        join_timeout_s = max(timeout_s, _LEAST_JOIN_S) if join_timeout_s is None else join_timeout_s
        if not (timeout_s > 0 and join_timeout_s > 0):
            raise UsageError(f"timeout_s {timeout_s}, join_timeout_s {join_timeout_s} were given; give times above 0, in seconds")
        self.timeout_s = timeout_s
        self.device = torch.device(device)
        self.rank, self.size = _place(environment)
        self._board = Board(self.rank, self.size, timeout_s)
        self._link = _Link(self._board, self.device, join_timeout_s, environment) if self.size > 1 else None
        self._calls = 0
        if self._link is not None:
            # Covers a program that ends without close(): the other ranks are told, and no thread is cut off in the middle.
            self._finalizer = weakref.finalize(self, self._link.close)

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Work:
        """Start sending `tensor` to another rank; data moves once that rank has called `receive_`."""
        check_rank(destination, self.size, "destination", self.rank)
        assert self._link is not None, "a group of one rank has no other rank"
        return self._link.messages.send(tensor, destination, tag)

    def receive_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into `tensor` from another rank."""
        check_rank(source, self.size, "source", self.rank)
        assert self._link is not None, "a group of one rank has no other rank"
        return self._link.messages.receive_(tensor, source, tag)

    def sum_(
        self, out: Tensor, parts: Sequence[Tensor], *, owner: int | None = None, order: Order | None = None, label: str = ""
    ) -> Work:
        """Start a sum; it is gloo's or NCCL's own where neither an order nor the dtype asks for more."""
        parts = [part.detach() for part in parts]
        out = out.detach()
        sum_call(0, out, parts, owner, order, label, self.size)
        keeps = owner is None or owner == self.rank
        small = self._is_small(out)
        flat = out.view(-1) if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format).view(-1)
        flat_parts = [part.reshape(-1) for part in parts]
        if order is None:
            add_up(flat, flat_parts)
            flat_parts = [flat]

        def move(brought: Brought) -> None:
            if order is not None:
                check_order(order, [call.parts for call, _ in brought])
            settled = by_rank([1] * self.size) if order is None else order
            assert settled is not None, "a group has a rank"
            if self.size == 1:
                flat.copy_(evaluate(settled, lambda _, part: flat_parts[part], lambda _: torch.empty_like(flat)))
            elif small:
                if keeps:
                    _sum_small(flat, brought, settled)
            elif order is None and out.dtype in NATIVE_DTYPES:
                any_order(flat, owner, self._data_group)
            else:
                fixed_order(flat, flat_parts, owner, settled, self._data_group)
            if keeps and not out.is_contiguous():
                out.copy_(flat.view(out.shape))

        def make(number: int) -> Call:
            return sum_call(number, out, parts, owner, order, label, self.size)

        payload = b"".join(map(_payload, flat_parts)) if small and self.size > 1 else b""
        return self._start(make, move, [flat, *flat_parts], payload, small)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy of every rank's tensor; small ones come with the call, each other one is broadcast by its rank."""
        tensor = tensor.detach().contiguous()
        results: list[Tensor] = []

        def move(brought: Brought) -> None:
            for rank, (call, payload) in enumerate(brought):
                dtype, shape = _tensor_of(call.what)
                result = tensor.clone() if rank == self.rank else torch.empty(shape, dtype=dtype, device=tensor.device)
                results.append(result)
                if not call.parts and rank != self.rank:
                    _fill(result, payload)
                elif call.parts:
                    dist.broadcast(bytes_of(result), group_src=rank, group=self._data_group)

        small = self._is_small(tensor)

        def make(number: int) -> Call:
            return Call("gather", number, describe(tensor), parts=int(not small))

        # Whether the others' tensors are small is known only once they have called, so data may have to move.
        self._start(make, move, [tensor], _payload(tensor) if small and self.size > 1 else b"", False).wait()
        return results

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Copy the source's tensor into every other rank's."""
        check_rank(source, self.size, "source")
        tensor = tensor.detach()
        flat = tensor.contiguous().view(-1)
        small = self._is_small(tensor)

        def move(brought: Brought) -> None:
            if small and self.rank != source:
                _fill(flat, brought[source][1])
            elif not small:
                dist.broadcast(bytes_of(flat), group_src=source, group=self._data_group)
            if self.rank != source and not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

        payload = _payload(flat) if small and self.rank == source else b""
        self._start(
            lambda number: Call("broadcast_", number, describe(tensor), f" from rank {source}"), move, [flat], payload, small
        ).wait()

    def barrier(self) -> None:
        """Return once every rank has called it; no data moves."""
        self._start(lambda number: Call("barrier", number), lambda brought: None, [], b"", True).wait()

    def fail(self, failure: Failure) -> None:
        """Announce this rank's failure to all others, at once."""
        if self._link is None:
            self._board.break_(peer_error(failure))
        else:
            self._link.exchange.fail(failure)

    def close(self) -> None:
        """Tell the others, end the threads, and give back the groups that this transport made. A second call does nothing."""
        if self._link is not None:
            self._finalizer()
        self._board.closed = True

    @property
    def _data_group(self) -> dist.ProcessGroup:
        assert self._link is not None, "a group of one rank moves no data"
        return self._link.data_group

    def _is_small(self, tensor: Tensor) -> bool:
        # Reading a CUDA tensor would wait for all that was issued before it.
        return self.size == 1 or (not tensor.is_cuda and tensor.numel() * tensor.element_size() <= _SMALL_BYTES)

    def _start(
        self, make: Callable[[int], Call], move: Callable[[Brought], None], tensors: Sequence[Tensor], payload: bytes, small: bool
    ) -> Work:
        """Make a call and return its work: `move` is run once all ranks have called, where `small` by whoever waits."""
        if self._link is None:
            return self._start_alone(make, move, payload)
        call = self._link.exchange.call(make, payload)
        work = CallWork(self._board, call, move, tensors, alone=small)
        if not small:
            self._link.runner.put(work)
        return work

    def _start_alone(self, make: Callable[[int], Call], move: Callable[[Brought], None], payload: bytes) -> Work:
        with self._board.changed:
            self._board.check()
        call = make(self._calls)
        self._calls += 1
        with self._board.changed:
            self._board.record(call, 0, payload)
        return CallWork(self._board, call, move, [], alone=True)


class _Link:
    """What a transport of several processes holds: groups, connections and threads."""

    def __init__(self, board: Board, device: torch.device, join_timeout_s: float, environment: Environment | None) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self._owns_default = not dist.is_initialized()
        try:
            store = self._join(device, join_timeout_s, environment)
            wire = Wire(store, board.rank, board.size, join_timeout_s)
        except (RuntimeError, OSError) as error:
            self._destroy()
            raise DeadlineError(
                f"rank {board.rank} of {board.size} could not join the others within {join_timeout_s:g} s: {error}; "
                "see that all of them were started, and that they reach each other at MASTER_ADDR and MASTER_PORT"
            ) from error
        store.set_timeout(timedelta(seconds=3))
        self.messages = Messages(board, wire, *self._groups[-2:])
        self.exchange = Exchange(board, wire, store, self.messages, _host_note())
        self.runner = DataThread(board.rank, self._destroy_data_group)
        self._wire = wire

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The group of the collectives; used on the data thread only."""
        if not self._groups:
            raise RuntimeError("the connections were given up after an earlier error")
        return self._groups[0]

    def _join(self, device: torch.device, join_timeout_s: float, environment: Environment | None) -> Store:
        backend, limit = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=join_timeout_s)
        if self._owns_default:
            if environment is None or "RANK" in os.environ:
                dist.init_process_group(backend, timeout=limit)  # which also knows of a store that the agent keeps
            else:
                address = f"tcp://{environment.master_address}:{environment.master_port}"
                dist.init_process_group(
                    backend, init_method=address, rank=environment.rank, world_size=environment.size, timeout=limit
                )
        # NCCL carries both directions between two ranks on one stream, where each would wait for the other.
        count = 3 if device.type == "cuda" else 2
        self._groups = [dist.new_group(backend=backend, timeout=limit) for _ in range(count)]
        store = PrefixStore("paceline", self._groups[0].get_group_store().clone())  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store

    def close(self) -> None:
        """Tell the others, end the threads, give back the groups."""
        self.exchange.leave()
        self.runner.stop()
        self._wire.close()
        self.messages.close()
        self._destroy()

    def _destroy_data_group(self) -> None:
        if self._groups and dist.is_initialized():
            dist.destroy_process_group(self._groups.pop(0))

    def _destroy(self) -> None:
        groups, self._groups = self._groups, []
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)
            if self._owns_default:
                dist.destroy_process_group()


def _place(environment: Environment | None) -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if environment is not None:
        return environment.rank, environment.size
    single = os.environ.get("WORLD_SIZE") == "1"
    wanted = ["RANK", "WORLD_SIZE"] + ([] if single else ["MASTER_ADDR", "MASTER_PORT"])
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise UsageError(
            f"there is no process group, and the variables {', '.join(missing)} are not set; start the program with torchrun, "
            "call torch.distributed.init_process_group first, or use the threads transport"
        )
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _host_note() -> str:
    """Return what else is lost with rank 0: the store, unless torchrun's agent or the program keeps it elsewhere."""
    elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_ADDR" not in os.environ
    return "" if elsewhere else "; it hosted the rendezvous store, so no new group can be made without it"


def _payload(tensor: Tensor) -> bytes:
    return bytes_of(tensor).numpy().tobytes()


def _fill(tensor: Tensor, payload: bytes) -> None:
    """Copy received bytes into a contiguous tensor."""
    if payload:
        bytes_of(tensor).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))


def _sum_small(flat: Tensor, brought: Brought, order: Order) -> None:
    """Evaluate `order` over the parts that came along with the calls."""
    if not flat.numel():
        return
    received = [
        torch.frombuffer(bytearray(payload), dtype=flat.dtype).view(-1, flat.numel()) if payload else None for _, payload in brought
    ]

    def leaf(rank: int, part: int) -> Tensor:
        parts = received[rank]
        assert parts is not None, "a rank that brings a part sends it"
        return parts[part]

    flat.copy_(evaluate(order, leaf, lambda _: torch.empty_like(flat)))


def _tensor_of(words: str) -> tuple[torch.dtype, list[int]]:
    """Return the dtype and the shape that `describe` put into words."""
    dtype, _, shape = words.partition("[")
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype), words
    return found, [int(length) for length in shape.rstrip("]").split(",") if length]
