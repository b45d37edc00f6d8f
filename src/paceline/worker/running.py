"""The workers that live in this process: one in the caller's thread, or several in threads of their own."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TypeVar

import torch

from paceline.errors import Failure, PacelineError, PeerError, UsageError
from paceline.worker.masks import SharedDraws
from paceline.worker.replica import mirror
from paceline.worker.thread import GRACE_S, WorkerThread, in_callers_modes
from paceline.worker.worker import Worker

T = TypeVar("T")


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(ABC):
    """This process's workers; `run` has each of them do the same and returns what each returned, in rank order."""

    workers: Sequence[Worker]
    closed = False

    @abstractmethod
    def run(self, function: Callable[[Worker], T]) -> list[T]:
        """Run `function` on every worker at once; raise the first failure, with its own type and traceback."""

    @abstractmethod
    def close(self) -> None:
        """End what `run` needed. A second call does nothing."""


class OneWorker(Workers):
    """A worker in the caller's thread: alone, or one of several processes."""

    def __init__(self, worker: Worker) -> None:
        self.workers = [worker]

    def run(self, function: Callable[[Worker], T]) -> list[T]:
        _check_open(self)
        return [function(self.workers[0])]

    def close(self) -> None:
        self.closed = True
        self.workers[0].transport.close()


class WorkerThreads(Workers):
    """Several workers, each in a thread of its own for life, given the caller's grad mode, autocast and context variables."""

    def __init__(self, workers: Sequence[Worker], shared: SharedDraws, intra_op_threads: int | None) -> None:
        self.workers = list(workers)
        self._shared = shared
        self._broken: Failure | None = None
        self._threads = [WorkerThread(f"paceline-{worker.rank}") for worker in workers]
        if intra_op_threads is not None:
            wait([thread.submit(functools.partial(torch.set_num_threads, intra_op_threads)) for thread in self._threads])

    def run(self, function: Callable[[Worker], T]) -> list[T]:
        _check_open(self)
        if self._broken is not None:
            raise PacelineError(f"the workers stopped at an earlier failure ({self._broken}); make a new Trainer")
        for worker in self.workers[1:]:
            mirror(self.workers[0].model, worker.model)
        self._shared.mark()
        futures = [
            thread.submit(in_callers_modes(functools.partial(function, worker)))
            for thread, worker in zip(self._threads, self.workers, strict=True)
        ]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException as interrupt:  # Ctrl-C: the workers must not go on behind the caller's back
            self._broken = Failure.of(interrupt, rank=0, doing="interrupted")
            self.workers[0].transport.fail(self._broken)
            wait(futures, GRACE_S)
            raise
        if any(future.done() and future.exception() is not None for future in futures):
            wait(futures, GRACE_S)  # the others stop at their next exchange
            raise self._first_error(futures)
        self._shared.check()
        return [future.result() for future in futures]

    def _first_error(self, futures: Sequence[Future[T]]) -> BaseException:
        errors = {rank: error for rank, future in enumerate(futures) if future.done() and (error := future.exception()) is not None}
        told = next((error.failure for error in errors.values() if isinstance(error, PeerError)), None)
        own = {rank: error for rank, error in errors.items() if not isinstance(error, PeerError)}
        error = own.get(told.rank) if told is not None else None
        error = error or next(iter(own.values()), None) or next(iter(errors.values()))
        self._broken = told or Failure.of(error, rank=next(iter(errors)))
        for rank, future in enumerate(futures):
            if not future.done():
                error.add_note(f"rank {rank} is still busy here:\n{self._threads[rank].stack()}")
        return error

    def close(self) -> None:
        self.closed = True
        for worker in self.workers:
            worker.transport.close()
        for thread in self._threads:
            thread.end()


def _check_open(workers: Workers) -> None:
    if workers.closed:
        raise UsageError("the trainer is closed; make a new one with the same model, which keeps its weights")
