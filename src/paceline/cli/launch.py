"""Starting this host's worker processes through torch's elastic agent, and telling in our words how they ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.cli.failures import FAILED, read_first_failure, read_started, read_stop
from paceline.transport.environment import RUN_ID_PREFIX

SHUTDOWN_S = 5
# What asks workers to finish their step and save; the first of each is passed on to them.
ASKING = (signal.SIGTERM, signal.SIGINT)
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_in_processes(argv: Sequence[str], num_workers: int) -> int:
    """Run `paceline ARGV` in `num_workers` processes of this host, each with torchrun's variables, and return the exit status.

    Blocks until all of them have ended, prints the first failure, passes SIGTERM and SIGINT on so that workers in training stop
    after their step, and takes the workers down at a second one, at SIGHUP and at SIGQUIT. Must be called from the main thread,
    since it handles signals.
    """
    # Imported here: the agent takes a second to import, which commands that start nothing should not spend.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def end(number: signal.Signals) -> None:
        raise SignalException(f"got {number.name}", sigval=number)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True))
        stack.enter_context(_quiet_agent())
        asked = _Signals(folder, num_workers, end)
        stack.enter_context(asked)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=f"{RUN_ID_PREFIX}{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{_free_port()}",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="",  # the agent would end the workers at the first one
            shutdown_timeout=SHUTDOWN_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        # Workers import what this process imports: -m alone would put the working directory first.
        safe_path = [] if os.getcwd() in sys.path or "" in sys.path else ["-P"]
        command = [*safe_path, "-m", "paceline.cli.worker", folder, str(os.getpid()), *argv]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            if asked.received is None or _has_own_failure(folder):
                return _explain(folder, {rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException:
            pass
        else:
            # The main worker has said what it saved; where all were done already, nothing was left to stop.
            return read_stop(folder) or 0
    assert asked.received is not None
    print(f"error: stopped by {asked.received.name}; all workers have ended", file=sys.stderr)
    return 128 + int(asked.received)


class _Signals:
    """The launcher's handling of signals inside a block.

    The first SIGTERM and the first SIGINT go on to the workers, which finish their step and save: a terminal's Ctrl-C does not
    reach them by itself, since each has a session of its own. Everything else calls `end`, as does a signal that comes before all
    workers are there, when there is nothing to save yet.
    """

    def __init__(self, folder: str, num_workers: int, end: Callable[[signal.Signals], None]) -> None:
        self._folder, self._num_workers, self._end = folder, num_workers, end
        self._before: dict[signal.Signals, Any] = {}
        self._passed_on: set[int] = set()
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in HANDLED}
        for number, handler in self._before.items():
            # Where nobody is meant to be interrupted (nohup, a background job), that stays so.
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        workers = read_started(self._folder)
        if number not in ASKING or number in self._passed_on or len(workers) < self._num_workers:
            self._end(signal.Signals(number))
            return
        self._passed_on.add(number)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, number)


def _has_own_failure(folder: str) -> bool:
    """Return whether a worker failed by itself, and not because others were stopped."""
    report = read_first_failure(folder)
    return report is not None and report.is_own


def _explain(folder: str, exit_codes: dict[int, int]) -> int:
    report = read_first_failure(folder)
    # The others may have noticed that one is gone, but only its status says how it went.
    was_killed = any(code < 0 and code != -signal.SIGTERM for code in exit_codes.values())
    if report is not None and (report.is_own or not was_killed):
        report.show()
        return report.status
    # The agent ends the others with SIGTERM as soon as it sees the first, and they end by themselves where they notice it before.
    first = sorted(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
    for rank, code in first[:1]:
        how = f"exited with status {code}"
        if code < 0:
            hint = "; the system ends processes so when memory runs out" if -code == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-code).name}{hint}"
        print(f"error: rank {rank} {how}, and left no exception; all other workers were stopped", file=sys.stderr)
    return FAILED


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's logs, tables and hints inside the block: a failure is told once, in our words."""
    logger = logging.getLogger("torch.distributed.elastic")
    agent_loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(logger.name)]
    for name in ("torch.distributed.launcher.api", "torch.multiprocessing.redirects"):
        agent_loggers.append(logging.getLogger(name))
    before = [(each, each.disabled) for each in (logger, *agent_loggers)]
    for each, _ in before:
        each.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, disabled in before:
            each.disabled = disabled
