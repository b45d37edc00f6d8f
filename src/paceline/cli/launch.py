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
from collections.abc import Iterator, Sequence

from paceline.cli.failures import FAILED, read_first_failure
from paceline.transport.environment import RUN_ID_PREFIX

SHUTDOWN_S = 5
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_in_processes(argv: Sequence[str], num_workers: int) -> int:
    """Run `paceline ARGV` in `num_workers` processes of this host, each with torchrun's variables, and return the exit status.

    Blocks until all of them have ended, prints the first failure, and takes the workers down on SIGTERM, SIGINT, SIGHUP and
    SIGQUIT. Must be called from the main thread, since it handles signals.
    """
    # Imported here: the agent takes a second to import, which commands that start nothing should not spend.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder, _quiet_agent(), _own_signals():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=f"{RUN_ID_PREFIX}{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{_free_port()}",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle=",".join(number.name for number in HANDLED),
            shutdown_timeout=SHUTDOWN_S,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        # Workers import what this process imports: -m alone would put the working directory first.
        safe_path = [] if os.getcwd() in sys.path or "" in sys.path else ["-P"]
        command = [*safe_path, "-m", "paceline.cli.worker", folder, str(os.getpid()), *argv]
        try:
            elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            return _explain(folder, {rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as interrupt:
            print(f"error: stopped by {signal.Signals(interrupt.sigval).name}; all workers have ended", file=sys.stderr)
            return 128 + int(interrupt.sigval)
    return 0


def _explain(folder: str, exit_codes: dict[int, int]) -> int:
    report = read_first_failure(folder)
    if report is not None:
        report.show()
        return report.status
    # The agent ends the others with SIGTERM as soon as it sees the first, which is therefore any other.
    first = sorted(exit_codes.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[0]))
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
def _own_signals() -> Iterator[None]:
    """Put the handlers of signals, which the agent replaces, back after the block."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
