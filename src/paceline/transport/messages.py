"""Point to point over process groups: data moves only once both ends have called and agree.

The receiver tells the sender what it wants; the sender compares that with what it has, starts sending and says go; then the
receiver starts receiving. So gloo never sees a message it has no room for, which would end the process, NCCL gets both
ends in one order, and neither end holds an operation that only a dead rank could complete.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import MismatchError
from paceline.transport import streams
from paceline.transport.base import Work
from paceline.transport.calls import Broken, describe
from paceline.transport.exchange import Board
from paceline.transport.wire import Wire


@dataclass(eq=False)
class _End:
    """One end of a message: `flat` is sent or received, and `handle` is there once that has started."""

    tensor: Tensor
    flat: Tensor
    peer: int
    tag: int
    what: str
    events: list[torch.cuda.Event]
    started: bool = False
    handle: dist.Work | None = None


@dataclass(eq=False)
class _Route:
    """What is open between this rank and another under one tag."""

    sends: deque[_End] = field(default_factory=deque)
    wants: deque[str] = field(default_factory=deque)
    receives: deque[_End] = field(default_factory=deque)


class Messages:
    """One rank's messages, sent and received; upward and downward ranks have groups of their own, as NCCL streams need."""

    def __init__(self, board: Board, wire: Wire, up: dist.ProcessGroup, down: dist.ProcessGroup) -> None:
        self._board = board
        self._wire = wire
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = (down, up)
        self._routes: dict[tuple[int, int], _Route] = {}
        # Both ends must start the messages of a route in one order, whichever thread starts them.
        self._starting = threading.Lock()

    def send(self, tensor: Tensor, destination: int, tag: int) -> Work:
        """Start sending once the destination wants it."""
        end = self._end(tensor, destination, tag)
        with self._starting:
            self._route(end).sends.append(end)
            self._match(destination, tag)
        return _MessageWork(self._board, end, sends=True)

    def receive_(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Tell the source what is wanted, and start receiving once it says go."""
        end = self._end(tensor, source, tag)
        with self._starting:
            self._route(end).receives.append(end)
            self._wire.send(source, {"is": "want", "tag": tag, "what": end.what})
        return _MessageWork(self._board, end, sends=False)

    def take(self, peer: int, message: dict[str, Any]) -> None:
        """Take a message about messages, on the reading thread."""
        kind = message["is"]
        if kind == "refuse":
            self._board.break_(Broken(MismatchError, message["text"]))
            return
        with self._starting:
            route = self._routes.setdefault((peer, message["tag"]), _Route())
            if kind == "want":
                route.wants.append(message["what"])
                self._match(peer, message["tag"])
            else:
                self._start(route.receives.popleft(), sends=False)

    def close(self) -> None:
        """Let the groups go."""
        with self._starting:
            self._groups = None
            self._routes.clear()

    def _end(self, tensor: Tensor, peer: int, tag: int) -> _End:
        with self._board.changed:
            self._board.check()
        tensor = tensor.detach()
        return _End(tensor, tensor.contiguous().view(-1), peer, tag, describe(tensor), streams.mark([tensor]))

    def _route(self, end: _End) -> _Route:
        return self._routes.setdefault((end.peer, end.tag), _Route())

    def _match(self, peer: int, tag: int) -> None:
        """Start what both ends have called for; hold `_starting`."""
        route = self._routes[peer, tag]
        while route.sends and route.wants:
            end, what = route.sends.popleft(), route.wants.popleft()
            if end.what != what:
                text = (
                    f"rank {self._board.rank} sends {end.what} with tag {tag}, rank {peer} receives {what}; "
                    "both ends must give the same shape and dtype"
                )
                self._board.break_(Broken(MismatchError, text))
                self._wire.send(peer, {"is": "refuse", "text": text})
                return
            self._wire.send(peer, {"is": "go", "tag": tag})
            self._start(end, sends=True)

    def _start(self, end: _End, *, sends: bool) -> None:
        """Hand one end to its group, and wake whoever waits for it; hold `_starting`."""
        if end.flat.numel() and self._groups is not None:
            group = self._groups[(end.peer > self._board.rank) == sends]
            data = end.flat.view(torch.uint8)
            with streams.aside([data], end.events):
                try:
                    if sends:
                        end.handle = dist.isend(data, group_dst=end.peer, group=group, tag=end.tag)
                    else:
                        end.handle = dist.irecv(data, group_src=end.peer, group=group, tag=end.tag)
                except RuntimeError:
                    # The other process is gone; the end of its connection to this one says so in better words.
                    return
        with self._board.changed:
            end.started = True
            self._board.changed.notify_all()


class _MessageWork(Work):
    def __init__(self, board: Board, end: _End, *, sends: bool) -> None:
        self._board, self._end, self._sends, self._over = board, end, sends, False

    def wait(self) -> None:
        """Wait until both ends have called and the data is through."""
        if self._over:
            return
        end, board = self._end, self._board
        words = f"{'send to' if self._sends else 'receive_ from'} rank {end.peer} with tag {end.tag} of {end.what}"
        with board.changed:
            if not end.started:
                board.check()
            board.until(lambda: end.started, words, lambda: [end.peer])
        if end.handle is not None:
            try:
                end.handle.wait()
            except RuntimeError as error:
                board.settle(error, words)
        if not self._sends and not end.tensor.is_contiguous():
            end.tensor.copy_(end.flat.view(end.tensor.shape))
        self._over = True
