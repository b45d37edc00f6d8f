"""Workers that are threads of one process: tensors are handed over by reference, and whoever waits first does the work.

A sum is cut into chunks that any waiting rank may take. So a rank that waits makes progress alone, works may be waited
for in any order, and ranks that wait together share the work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from paceline.errors import DeadlineError, Failure, MismatchError, PacelineError, UsageError
from paceline.transport import streams
from paceline.transport.base import Order, Transport, Work
from paceline.transport.calls import (
    Broken,
    Call,
    bounds,
    by_rank,
    check_order,
    check_rank,
    deadline,
    describe,
    evaluate,
    left_early,
    mismatch,
    peer_error,
    sum_call,
)

# A chunk of a sum stays in a core's second-level cache while it goes from the parts to all destinations.
_CHUNK_BYTES = 256 * 1024

T = TypeVar("T")


@dataclass(eq=False)
class _Round:
    """One collective: what every rank brought, and how far the work on it is."""

    calls: dict[int, Call] = field(default_factory=dict)
    outs: dict[int, Tensor] = field(default_factory=dict)
    parts: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    events: list[torch.cuda.Event] = field(default_factory=list)
    done_events: list[torch.cuda.Event] = field(default_factory=list)
    order: Order | None = None
    chunks: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0
    done: int = 0
    left: int = 0


@dataclass(eq=False)
class _Message:
    """One tensor on its way from one rank to another; either end may come first, and either may copy."""

    source: Tensor | None = None
    target: Tensor | None = None
    events: list[torch.cuda.Event] = field(default_factory=list)
    taken: bool = False
    done: bool = False


class _Group:
    """What the ends of one group share; all of it is guarded by `changed`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition(threading.Lock())
        self.rounds: dict[int, _Round] = {}
        self.messages: dict[tuple[int, int, int], deque[_Message]] = {}
        self.broken: Broken | None = None
        self.gone: dict[int, Failure | None] = {}

    def break_(self, broken: Broken) -> PacelineError:
        """Make every end of the group of no use, unless it is already; return the error to raise."""
        if self.broken is None:
            self.broken = broken
            self.changed.notify_all()
        return self.broken.error()


class ThreadsTransport(Transport):
    """One thread's end of a group of worker threads; make them with `group`."""

    name = "threads"

    def __init__(self, group: _Group, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = group.size
        self.timeout_s = timeout_s
        self._group = group
        self._calls = 0
        self._broken: Broken | None = None
        self._closed = False

    @classmethod
    def group(cls, size: int, timeout_s: float = 600.0) -> list[ThreadsTransport]:
        """Return the ends of a new group, one for each of `size` threads; `timeout_s` bounds every wait, in seconds.

        Raises:
            UsageError: `size` is below 1, or `timeout_s` is not above 0.
        """
        if size < 1 or not timeout_s > 0:
            raise UsageError(
                f"a group of {size} ranks with timeout_s {timeout_s} was asked for; give at least 1 rank, and a time above 0"
            )
        shared = _Group(size)
        return [cls(shared, rank, timeout_s) for rank in range(size)]

    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Work:
        """Start handing `tensor` to another rank, which copies it; nothing is copied before that."""
        check_rank(destination, self.size, "destination", self.rank)
        return _MessageWork(self, tensor.detach(), (self.rank, destination, tag), sends=True)

    def receive_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into `tensor`; the end that waits first copies."""
        check_rank(source, self.size, "source", self.rank)
        return _MessageWork(self, tensor.detach(), (source, self.rank, tag), sends=False)

    def sum_(
        self, out: Tensor, parts: Sequence[Tensor], *, owner: int | None = None, order: Order | None = None, label: str = ""
    ) -> Work:
        """Start a sum, in rank order where no `order` is given; the parts are read in place by the ranks that wait."""
        call = sum_call(self._calls, out, parts, owner, order, label, self.size)
        return _SumWork(self, call, out.detach(), [part.detach() for part in parts], owner, order)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return a copy of every rank's tensor, on the device of this rank's own."""
        tensor = tensor.detach()

        def copy(brought: _Round) -> list[Tensor]:
            parts = [brought.outs[rank] for rank in range(self.size)]
            return [torch.empty_like(part, device=tensor.device).copy_(part) for part in parts]

        return self._together(Call("gather", self._calls, describe(tensor)), tensor, copy)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Copy the source's tensor into every other rank's; no rank returns before all have copied."""
        tensor = tensor.detach()
        check_rank(source, self.size, "source")

        def copy(brought: _Round) -> None:
            if self.rank != source:
                tensor.copy_(brought.outs[source])

        self._together(Call("broadcast_", self._calls, describe(tensor), f" from rank {source}"), tensor, copy)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        call = Call("barrier", self._calls)
        with self._group.changed:
            entered = self._enter(call)
            self._until_all_entered(entered, call)
            self._leave(entered, call)

    def fail(self, failure: Failure) -> None:
        """Announce this rank's failure to the group; only the first one counts."""
        with self._group.changed:
            self._group.break_(peer_error(failure))

    def close(self) -> None:
        """Leave the group: whoever still waits for this rank gets a `PeerError`. A second call does nothing."""
        with self._group.changed:
            if not self._closed:
                self._closed = True
                self._group.gone[self.rank] = None if self._broken is None else Failure.of(self._broken.error(), rank=self.rank)
                self._group.changed.notify_all()

    def _together(self, call: Call, tensor: Tensor, copy: Callable[[_Round], T]) -> T:
        """Bring `tensor`, copy what the others brought, and return once all have copied."""
        group = self._group
        with group.changed:
            entered = self._enter(call)
            entered.outs[self.rank] = tensor
            entered.events += streams.mark([tensor])
            self._until_all_entered(entered, call)
            events = list(entered.events)
        streams.follow(events, [tensor])
        result = copy(entered)
        with group.changed:
            entered.done_events += streams.mark([tensor])
            entered.done += 1
            group.changed.notify_all()
            self._until(lambda: entered.done == self.size, call, list)
            self._leave(entered, call)
            events = list(entered.done_events)
        streams.follow(events, [tensor])
        return result

    def _check(self) -> None:
        """Raise what is wrong with the group or with this end of it."""
        if self._closed:
            raise UsageError(f"rank {self.rank} used its transport after close(); make a new group")
        if self._group.broken is not None:
            raise self._group.broken.error()
        if self._broken is not None:
            raise self._broken.error()

    def _enter(self, call: Call) -> _Round:
        """Make `call` the next of this rank's; hold the lock."""
        self._check()
        self._calls += 1
        group = self._group
        entered = group.rounds.setdefault(call.number, _Round())
        for rank, other in entered.calls.items():
            if other.key != call.key:
                pair = sorted([(rank, other), (self.rank, call)], key=lambda item: item[0])
                raise group.break_(Broken(MismatchError, mismatch(*pair[0], *pair[1])))
        entered.calls[self.rank] = call
        if len(entered.calls) == self.size:
            group.changed.notify_all()
        return entered

    def _leave(self, entered: _Round, call: Call) -> None:
        """Forget the round once every rank has left it; hold the lock."""
        entered.left += 1
        if entered.left == self.size:
            del self._group.rounds[call.number]

    def _until_all_entered(self, entered: _Round, call: Call) -> None:
        self._until(
            lambda: len(entered.calls) == self.size, call, lambda: [rank for rank in range(self.size) if rank not in entered.calls]
        )

    def _until(self, ready: Callable[[], bool], call: object, missing: Callable[[], list[int]]) -> None:
        """Wait for `ready` while nothing is wrong, at most until the deadline; hold the lock."""
        group, end = self._group, time.monotonic() + self.timeout_s
        while not ready():
            self._check()
            for rank in missing():
                if rank in group.gone:
                    left = group.gone[rank] or left_early(rank, call)
                    raise group.break_(peer_error(left))
            remaining = end - time.monotonic()
            if remaining <= 0:
                self._broken = Broken(DeadlineError, deadline(self.rank, self.timeout_s, call, missing()))
                raise self._broken.error()
            group.changed.wait(remaining)


class _MessageWork(Work):
    """One end of a message: whichever end waits first once both have called copies the tensor."""

    def __init__(self, transport: ThreadsTransport, tensor: Tensor, route: tuple[int, int, int], *, sends: bool) -> None:
        self._transport, self._tensor, self._over = transport, tensor, False
        source, target, tag = route
        self._peer = target if sends else source
        self._words = f"{'send to' if sends else 'receive_ from'} rank {self._peer} with tag {tag} of {describe(tensor)}"
        group = transport._group
        with group.changed:
            transport._check()
            queue = group.messages.setdefault(route, deque())
            self._message = next((m for m in queue if (m.source if sends else m.target) is None), None) or _Message()
            message = self._message
            if sends:
                message.source = tensor
            else:
                message.target = tensor
            message.events += streams.mark([tensor])
            if message.source is None or message.target is None:
                queue.append(message)
                return
            queue.remove(message)
            if not queue:
                del group.messages[route]
            if describe(message.source) != describe(message.target):
                message.taken = True
                group.break_(
                    Broken(
                        MismatchError,
                        f"rank {source} sends {describe(message.source)} with tag {tag}, rank {target} receives "
                        f"{describe(message.target)}; both ends must give the same shape and dtype",
                    )
                )
            group.changed.notify_all()

    def wait(self) -> None:
        """Copy, or wait until the other end has copied."""
        if self._over:
            return
        message, transport = self._message, self._transport
        group = transport._group
        with group.changed:
            if not message.done:
                transport._check()
            transport._until(
                lambda: message.source is not None and message.target is not None and (message.done or not message.taken),
                self._words,
                lambda: [self._peer] if message.source is None or message.target is None else [],
            )
            copies, message.taken = not message.taken, True
        source, target = message.source, message.target
        if copies and source is not None and target is not None:
            streams.follow(message.events, [source, target])
            target.copy_(source)
            with group.changed:
                message.events = streams.mark([source, target])
                message.done = True
                group.changed.notify_all()
        streams.follow(message.events, [self._tensor])
        self._over = True


class _SumWork(Work):
    """One rank's share in a sum: chunks that it takes while others take theirs."""

    def __init__(
        self, transport: ThreadsTransport, call: Call, out: Tensor, parts: Sequence[Tensor], owner: int | None, order: Order | None
    ) -> None:
        self._transport, self._call, self._out, self._over = transport, call, out, False
        self._keeps = owner is None or owner == transport.rank
        # A rank with a scattered result takes it in one piece of its own and spreads it out at the end.
        self._flat = out.view(-1) if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format).view(-1)
        flat_parts = [part.reshape(-1) for part in parts]
        group = transport._group
        with group.changed:
            self._round = entered = transport._enter(call)
            if self._keeps:
                entered.outs[transport.rank] = self._flat
            entered.parts[transport.rank] = flat_parts
            entered.events += streams.mark([self._flat, *flat_parts])
            if len(entered.calls) == group.size:
                self._plan(entered, order)

    def _plan(self, entered: _Round, order: Order | None) -> None:
        """Settle order and chunks, as the last rank to come; hold the lock."""
        group, counts = self._transport._group, [len(entered.parts[rank]) for rank in range(self._transport.size)]
        try:
            if order is not None:
                check_order(order, counts)
        except UsageError as error:
            group.break_(Broken(UsageError, str(error)))
            return
        entered.order = by_rank(counts) if order is None else order
        numel, size = self._flat.numel(), self._flat.element_size()
        if numel:
            count = len(entered.outs) if self._flat.is_cuda else -(-numel * size // _CHUNK_BYTES)
            entered.chunks = bounds(numel, count)

    def wait(self) -> None:
        """Add up chunks until none is left, and return once the last is done."""
        if self._over:
            return
        transport, entered = self._transport, self._round
        group = transport._group
        with group.changed:
            transport._check()
            transport._until_all_entered(entered, self._call)
            transport._check()
            tensors = [*entered.outs.values(), *(part for parts in entered.parts.values() for part in parts)]
        self._take_chunks(entered, tensors)
        with group.changed:
            transport._until(lambda: entered.done == len(entered.chunks), self._call, list)
            transport._leave(entered, self._call)
            events = list(entered.done_events)
        streams.follow(events, [self._flat])
        if self._keeps and not self._out.is_contiguous():
            self._out.copy_(self._flat.view(self._out.shape))
        self._over = True

    def _take_chunks(self, entered: _Round, tensors: Sequence[Tensor]) -> None:
        group, buffers = self._transport._group, _Buffers()
        streams.follow(entered.events, tensors)
        while True:
            with group.changed:
                self._transport._check()
                index = entered.taken
                if index == len(entered.chunks):
                    return
                entered.taken += 1
            try:
                _sum_chunk(entered, index, buffers)
            except BaseException as error:
                with group.changed:
                    group.break_(peer_error(Failure.of(error, rank=self._transport.rank, doing=str(self._call))))
                raise
            with group.changed:
                entered.done_events += streams.mark(tensors)
                entered.done += 1
                if entered.done == len(entered.chunks):
                    group.changed.notify_all()


class _Buffers:
    """Room for partial sums, reused from chunk to chunk so that it stays in the cache."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.device], Tensor] = {}

    def at(self, depth: int, like: Tensor) -> Tensor:
        """Return room of the size of `like` on its device."""
        kept = self._kept.get((depth, like.device))
        if kept is None or kept.numel() < like.numel():
            kept = self._kept[depth, like.device] = torch.empty_like(like)
        return kept[: like.numel()]


def _sum_chunk(entered: _Round, index: int, buffers: _Buffers) -> None:
    """Add one chunk of all parts up, and copy the sum to all who keep it."""
    chunk = slice(*entered.chunks[index])
    targets = [out[chunk] for out in entered.outs.values()]
    first = targets[index % len(targets)]
    if entered.order is None:
        for target in targets:
            target.zero_()
        return
    # Two parts are added straight into their place; with more, that place could be a part that is still to be read.
    straight = sum(len(parts) for parts in entered.parts.values()) == 2
    total = evaluate(
        entered.order,
        lambda rank, part: entered.parts[rank][part][chunk].to(first.device),
        lambda depth: first if straight else buffers.at(depth, first),
    )
    for target in targets:
        if target.data_ptr() != total.data_ptr() or target.device != total.device:
            target.copy_(total)
