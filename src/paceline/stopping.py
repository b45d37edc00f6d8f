"""SIGINT and SIGTERM ask a run to stop after its step; a second one of a kind is obeyed at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def leave(self) -> NoReturn:
        """End the run as the signal would have: Ctrl-C interrupts, SIGTERM exits with its status."""
        if self.signal is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextlib.contextmanager
def use_stop_signals(tell: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn the first signal of a kind into a request inside the block, and put the handlers back after it.

    `tell` is called at once, in the middle of whatever the process does, so that the step that is being taken is the last.
    Outside of the main thread, where Python takes no signals, nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, frame: FrameType | None) -> None:
        request.signal = request.signal or signal.Signals(number)
        tell()
        # Whoever sends it again does not want to wait.
        signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)

    for number in SIGNALS:
        # Where nobody is meant to be interrupted (nohup, a background job), that stays so.
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
