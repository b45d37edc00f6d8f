"""Collectives of a process group as works, and the one thread that moves their data in the order of the calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from paceline.errors import PacelineError
from paceline.transport import streams
from paceline.transport.base import Work
from paceline.transport.calls import Call
from paceline.transport.exchange import Board

Brought: TypeAlias = Sequence[tuple[Call, bytes]]
"""What each rank said of a call, and the data that it sent along, in rank order."""

_END_S = 5.0


class CallWork(Work):
    """A collective that this rank has called: `alone` if the thread that waits carries it out, else the data thread does."""

    def __init__(
        self, board: Board, call: Call, move: Callable[[Brought], None], tensors: Sequence[Tensor], *, alone: bool
    ) -> None:
        self._board, self._call, self._move, self._alone = board, call, move, alone
        self._tensors, self._events = tensors, streams.mark(tensors)
        self._done = self._over = False
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait until all ranks have called and the data is through."""
        if self._over:
            return
        board, call = self._board, self._call
        with board.changed:
            if self._alone:
                board.until(lambda: board.complete(call.number), call, lambda: board.absent(call.number))
            else:
                board.until(lambda: self._done, call, self._absent)
        if self._alone:
            self._move(self._take())
        elif isinstance(self._error, PacelineError):
            with board.changed:
                board.check()
            raise self._error
        elif self._error is not None:
            board.settle(self._error, call)
        streams.follow(self._events, self._tensors)
        self._over = True

    def run(self) -> bool:
        """Carry the call out on the data thread; say whether its data came through, or none had begun to move."""
        board, call, moving = self._board, self._call, False
        try:
            with board.changed:
                board.until(lambda: board.complete(call.number), call, self._absent, bounded=False)
            moving = True
            with streams.aside(self._tensors, self._events):
                self._move(self._take())
                self._events = streams.mark(self._tensors)
        except Exception as error:
            # The frames of its traceback hold the group, whose connections end only with the last reference to it.
            self._error = error.with_traceback(None)
        with board.changed:
            self._done = True
            board.changed.notify_all()
        return self._error is None or not moving

    def _take(self) -> Brought:
        with self._board.changed:
            brought = self._board.rounds.pop(self._call.number)
        return [brought[rank] for rank in range(self._board.size)]

    def _absent(self) -> list[int]:
        """Return who keeps this work back: the ranks missing in it, or in an earlier one that the data thread is at."""
        for number in sorted(self._board.rounds):
            if number <= self._call.number and self._board.rank in self._board.rounds[number]:
                absent = self._board.absent(number)
                if absent:
                    return absent
        return []


class DataThread:
    """The one thread that moves the data of collectives, in the order of the calls."""

    def __init__(self, rank: int, stopped: Callable[[], None]) -> None:
        self._works: queue.SimpleQueue[CallWork | None] = queue.SimpleQueue()
        self._stopped = stopped
        self._thread = threading.Thread(target=self._run, name=f"paceline-data-{rank}", daemon=True)
        self._thread.start()

    def put(self, work: CallWork) -> None:
        """Carry `work` out after all that came before it."""
        self._works.put(work)

    def stop(self) -> None:
        """End the thread once its last work is over, or leave it to end with its connections where a peer holds it up."""
        self._works.put(None)
        # The last reference to a transport may go on this very thread, and close it there.
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            work = self._works.get()
            if work is None:
                return
            through = work.run()
            # A work refers to its transport, which must be free to go while this thread waits.
            del work
            if not through:
                # Ranks that are not next to the one that broke off hear of it by the end of the connections to this one.
                self._stopped()
