"""The threads that replicas live in: one for each, fed by whoever called the wrapper, and gone with it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from paceline.errors import PacelineError
from paceline.worker.thread import GRACE_S, WorkerThread

T = TypeVar("T")


class ReplicaThreads:
    """One daemon thread per replica; they end with `close`, with the last reference to this, or with the interpreter."""

    def __init__(self, count: int, intra_op_threads: int) -> None:
        self.count = count
        self._threads = [WorkerThread(f"paceline-replica-{index}") for index in range(count)]
        self.close = weakref.finalize(self, _end, self._threads)
        self.interrupted = False
        before = torch.get_num_threads()
        self.run([functools.partial(torch.set_num_threads, intra_op_threads)] * count)
        torch.set_num_threads(before)  # the number is also what threads that start later get: leave it as it was

    @property
    def open(self) -> bool:
        """Whether the threads still take calls."""
        return self.close.alive and not self.interrupted

    def run(self, calls: Sequence[Callable[[], T] | None]) -> list[T | None]:
        """Run one call in each thread, none where there is None; return the results once all are over.

        Raises:
            Exception: the first that a call raised, in the order of the threads, with its own type and traceback.
        """
        if not self.open:
            raise PacelineError("the replicas' threads have ended; call the wrapper again, which starts new ones")
        futures: list[Future[T] | None] = [
            None if call is None else thread.submit(call) for thread, call in zip(self._threads, calls, strict=True)
        ]
        running = [future for future in futures if future is not None]
        try:
            wait(running)
        except BaseException:  # Ctrl-C: what still runs must not go on beside the next call
            self.interrupted = bool(wait(running, GRACE_S).not_done)
            raise
        for future in running:
            error = future.exception()
            if error is not None:
                raise error
        return [None if future is None else future.result() for future in futures]


def _end(threads: Sequence[WorkerThread]) -> None:
    for thread in threads:
        thread.end()
