"""What the processes of a group know of each other: who made which call, what failed first, and who is gone.

Every rank tells every other of each collective it calls before any data moves. So a disagreement is found where it
arises, a wait that ends names the ranks that did not come, and gloo, whose operations cannot be stopped once they have
begun, begins them only when all ranks are there.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from torch._C._distributed_c10d import Store

from paceline.errors import DeadlineError, Failure, MismatchError, PacelineError, UsageError
from paceline.transport.calls import Broken, Call, deadline, left_early, mismatch, peer_error
from paceline.transport.wire import Wire

# How long a rank whose connection ended gets the benefit of the doubt: the record of why may come by way of others.
_GRACE_S = 1.5


class Board:
    """One rank's view of its group. All of it is guarded by `changed`; methods that say so want it held."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition(threading.RLock())
        self.broken: Broken | None = None
        self.closed = False
        self.rounds: dict[int, dict[int, tuple[Call, bytes]]] = {}
        self.gone: dict[int, Failure | None] = {}

    def check(self) -> None:
        """Raise what is wrong with this end; hold the lock."""
        if self.closed:
            raise UsageError(f"rank {self.rank} used its transport after close(); make a new one")
        if self.broken is not None:
            raise self.broken.error()

    def break_(self, broken: Broken) -> PacelineError:
        """Make this end of no use, unless it is already; return the error to raise."""
        with self.changed:
            if self.broken is None:
                self.broken = broken
                self.changed.notify_all()
            return self.broken.error()

    def record(self, call: Call, rank: int, payload: bytes) -> None:
        """Note that `rank` made `call`, and compare it with this rank's own; hold the lock."""
        brought = self.rounds.setdefault(call.number, {})
        brought[rank] = (call, payload)
        if self.rank in brought:
            own = brought[self.rank][0]
            for peer, (other, _) in brought.items():
                if other.key != own.key:
                    pair = sorted([(peer, other), (self.rank, own)], key=lambda item: item[0])
                    self.break_(Broken(MismatchError, mismatch(*pair[0], *pair[1])))
                    # The round stays open for ever, so that nobody carries it out.
                    del brought[peer]
                    return
        if len(brought) == self.size:
            self.changed.notify_all()

    def complete(self, number: int) -> bool:
        """Say whether every rank has made call `number`; hold the lock."""
        return len(self.rounds.get(number, {})) == self.size

    def absent(self, number: int) -> list[int]:
        """Return the ranks that have not made call `number`; hold the lock."""
        return [rank for rank in range(self.size) if rank not in self.rounds.get(number, {})]

    def until(self, ready: Callable[[], bool], call: object, missing: Callable[[], list[int]], *, bounded: bool = True) -> None:
        """Wait for `ready` while nothing is wrong, at most until the deadline where `bounded`; hold the lock."""
        end = time.monotonic() + self.timeout_s
        while not ready():
            self.check()
            absent = missing()
            for rank in absent:
                if rank in self.gone:
                    raise self.break_(peer_error(self.gone[rank] or left_early(rank, call)))
            remaining = end - time.monotonic() if bounded else None
            if remaining is not None and remaining <= 0:
                hint = "did not arrive" if absent else "all ranks arrived, but the data did not come through"
                raise self.break_(Broken(DeadlineError, deadline(self.rank, self.timeout_s, call, absent, hint)))
            self.changed.wait(remaining)

    def settle(self, error: Exception, call: object) -> NoReturn:
        """After the data of `call` stopped with `error`, wait for the words that say why, and raise them."""
        end = time.monotonic() + 2 * _GRACE_S
        with self.changed:
            while self.broken is None and time.monotonic() < end:
                self.changed.wait(end - time.monotonic())
        text = f"the data of {call} did not come through on rank {self.rank}: {type(error).__name__}: {error}"
        raise self.break_(Broken(PacelineError, text)) from error


class Listener(Protocol):
    """Who takes the messages that are not about the group as a whole."""

    def take(self, peer: int, message: dict[str, Any]) -> None:
        """Take a message from a rank, on the reading thread."""


class Exchange:
    """Keeps the board: sends this rank's news to the others, and writes down theirs."""

    def __init__(self, board: Board, wire: Wire, store: Store, listener: Listener, host_note: str) -> None:
        self.board = board
        self.wire = wire
        self._store = store
        self._listener = listener
        self._host_note = host_note
        self._lost: dict[int, float] = {}
        self._calling = threading.Lock()
        self._calls = 0
        wire.start(self._receive, self._lose, self._idle)

    def call(self, make: Callable[[int], Call], payload: bytes = b"") -> Call:
        """Make the next collective call, and tell the others; `payload` is data small enough to go along."""
        with self._calling:
            with self.board.changed:
                self.board.check()
            call = make(self._calls)
            self._calls += 1
            # Sent before it is compared: a rank that finds a mismatch and leaves has let the others find it too.
            self.wire.send_all({"is": "call", "call": call.fields()}, payload)
            with self.board.changed:
                self.board.record(call, self.board.rank, payload)
            return call

    def fail(self, failure: Failure) -> None:
        """Tell the others of the group's first failure, which is the given one unless another came first."""
        with self.board.changed:
            if self.board.closed or (self.board.broken is not None and isinstance(self.board.broken.argument, Failure)):
                return
        first = failure
        # Of two ranks that fail at once, the store lets one be the first. Without a store each keeps its own.
        with contextlib.suppress(RuntimeError):
            record = json.dumps(asdict(failure))
            first = Failure(**json.loads(self._store.compare_set("failure", "", record)))
        self.board.break_(peer_error(first))
        self.wire.send_all({"is": "failure", "failure": asdict(first)})

    def leave(self) -> None:
        """Tell the others that this rank closes, and why; give those that are still at work a moment to finish too."""
        with self.board.changed:
            if self.board.closed:
                return
            self.board.closed = True
            self.board.changed.notify_all()
            broken = self.board.broken
        failure = None if broken is None else Failure.of(broken.error(), rank=self.board.rank)
        # What only this rank met with, such as a deadline, matters to those who wait for this rank; a first failure to all.
        first = broken is not None and isinstance(broken.argument, Failure)
        self.wire.send_all({"is": "bye", "failure": None if failure is None else asdict(failure), "first": first})
        if broken is None:
            # gloo may still be handing the end of the last operation to a slower rank; closing would break that off.
            end = time.monotonic() + _GRACE_S
            with self.board.changed:
                while len(self.board.gone.keys() | self._lost.keys()) < self.board.size - 1 and time.monotonic() < end:
                    self.board.changed.wait(end - time.monotonic())

    def _receive(self, peer: int, message: dict[str, Any], payload: bytes) -> None:
        board, kind = self.board, message["is"]
        with board.changed:
            if kind == "call":
                board.record(Call(*message["call"]), peer, payload)
            elif kind == "failure":
                board.break_(peer_error(Failure(**message["failure"])))
            elif kind == "bye":
                failure = None if message["failure"] is None else Failure(**message["failure"])
                board.gone[peer] = failure
                if failure is not None and message["first"]:
                    board.break_(peer_error(failure))
                board.changed.notify_all()
        if kind not in ("call", "failure", "bye"):
            self._listener.take(peer, message)

    def _lose(self, peer: int) -> None:
        with self.board.changed:
            if peer not in self.board.gone:
                self._lost[peer] = time.monotonic()
                self.board.changed.notify_all()

    def _idle(self) -> None:
        """Once the time of grace is over, take a rank that is gone without a word for dead."""
        for peer, since in self._lost.items():
            if time.monotonic() - since > _GRACE_S and self.board.broken is None and not self.board.closed:
                message = "ended without a word (killed, or out of memory?)" + (self._host_note if peer == 0 else "")
                self.board.break_(peer_error(Failure(rank=peer, error="WorkerDied", message=message)))
