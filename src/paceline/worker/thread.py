"""A thread that a worker or a replica lives in, and what it takes along from the thread that calls it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")
GRACE_S = 10.0  # how long a thread may take to come to an end
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class WorkerThread:
    """Runs one call after another; a daemon, so that user code that never returns cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call, to be run with the caller's context variables, and return its future."""
        future: Future[T] = Future()
        self._calls.put((future, functools.partial(contextvars.copy_context().run, call)))
        return future

    def stack(self) -> str:
        """Return where the thread is now, as a formatted stack."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def end(self) -> None:
        """Let the thread end after the calls that are queued, and wait for it a little."""
        self._calls.put(None)
        if self._thread is not threading.current_thread():  # the last reference to its owner may go on the thread itself
            self._thread.join(GRACE_S)


def _serve(calls: _Calls) -> None:
    while (entry := calls.get()) is not None:
        future, call = entry
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            del error
        del entry, future, call  # a waiting thread must not keep a call's tensors alive


def in_callers_modes(call: Callable[[], T]) -> Callable[[], T]:
    """Return `call` under the grad mode, inference mode and autocast of the thread that asks for it."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in kinds}

    def under_modes() -> T:
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.inference_mode(inference))
            modes.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in dtypes.items():
                modes.enter_context(torch.autocast(kind, dtype=dtype))
            return call()

    return under_modes
