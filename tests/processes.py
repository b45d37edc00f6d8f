"""Runs a function in several fresh processes, and tells what became of each: a result, an exception, a signal, no end.

The function must be importable by name; `sys.exit` in it ends its process. Starting torch takes seconds, so `Workers` keeps
processes for many runs; one that was killed, or did not end in time, is replaced.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any


class ProcessDied(Exception):
    """A process ended without a result; `signal` is the number that killed it, or None."""

    def __init__(self, returncode: int) -> None:
        self.signal = -returncode if returncode < 0 else None
        how = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
        super().__init__(f"the process {how} and returned nothing")


class ProcessTimeout(Exception):
    """A process did not end in time, and was killed."""


class RemoteTraceback(Exception):
    """The traceback of an exception in its own process, as the cause of its copy here."""


class Workers:
    """Processes that are started when first needed and run one function after another; use it as a context manager."""

    def __init__(self) -> None:
        self._processes: list[_Worker | None] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        workers = [worker for worker in self._processes if worker is not None]
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.end()

    def run(
        self, size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Call `body(rank, size, *args)` in `size` processes; return per rank its result, or the exception that it raised.

        `environment` is set for the length of the call. After `timeout_s` seconds what still runs is killed.
        """
        self._processes += [None] * (size - len(self._processes))
        workers = []
        for rank in range(size):
            worker = self._processes[rank] or _Worker()
            self._processes[rank] = worker
            worker.start(body, (rank, size, *args), dict(environment or {}))
            workers.append(worker)
        end = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < size and time.monotonic() < end:
            open_ = {workers[rank].connection: rank for rank in range(size) if rank not in results}
            for ready in wait(list(open_), timeout=max(0.0, end - time.monotonic())):
                rank = open_[ready]  # type: ignore[index]
                results[rank] = workers[rank].result()
        for rank, worker in enumerate(workers):
            if rank not in results:
                results[rank] = ProcessTimeout(f"rank {rank} had not ended after {timeout_s:g} s")
                worker.end(patience_s=0.0)
            if not worker.alive:
                self._processes[rank] = None
        return [results[rank] for rank in range(size)]


def run_processes(size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **more: Any) -> list[Any]:
    """Do what `Workers.run` does in processes that nothing has run in before, and end them."""
    with Workers() as workers:
        return workers.run(size, body, *args, timeout_s=timeout_s, **more)


class _Worker:
    def __init__(self) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({there.fileno()})"],
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.connection = Connection(here.detach())
        self.alive = True

    def start(self, body: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> None:
        self.connection.send_bytes(pickle.dumps((body, args, environment)))

    def result(self) -> Any:
        try:
            fine, data, notes, trace = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.alive = False
            return ProcessDied(self._process.wait())
        result = pickle.loads(data)
        if not fine:
            result.__cause__ = RemoteTraceback(trace)
            result.__notes__ = notes
        return result

    def end(self, patience_s: float = 5.0) -> None:
        self.alive = False
        self.connection.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int) -> None:
    """Run what comes in, one after the other, until the other end closes."""
    import torch

    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            body, args, environment = pickle.loads(connection.recv_bytes())
            before = dict(os.environ)
            os.environ.update(environment)
            try:
                answer = (True, pickle.dumps(body(*args)), [], "")
            except SystemExit:
                raise
            except BaseException as error:
                answer = (False, _pickled(error), getattr(error, "__notes__", []), traceback.format_exc())
            os.environ.clear()
            os.environ.update(before)
            connection.send_bytes(pickle.dumps(answer))


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
