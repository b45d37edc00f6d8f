"""How a command fails: an exception becomes a record that any process can print, in one line or with its traceback once."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import typer

import paceline
from paceline.errors import Failure, PacelineError, PeerError, UsageError

FAILED, MISUSED = 1, 2
STOPPED = (130, 143)  # by SIGINT, by SIGTERM


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command has to say of an exception.

    Args:
        failure: the first failure; of a `PeerError` the one that it carries.
        is_own: whether it was this process that failed, not another worker.
        is_user_code: whether a traceback helps, since the exception is not one of Paceline's own.
        status: exit status of the command.
        at_s: when, in seconds of the wall clock.
    """

    failure: Failure
    is_own: bool
    is_user_code: bool
    status: int
    at_s: float

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Report:
        """Return the report of an exception that ended this process's part, which has `rank`."""
        failure = Failure.of(error, rank=rank)
        if not isinstance(error, PeerError):
            failure = dataclasses.replace(_place(failure, getattr(error, "__notes__", [])), trace=_trace_from_user_code(error))
        return cls(
            failure=failure,
            is_own=not isinstance(error, PeerError),
            is_user_code=not isinstance(error, PacelineError) or (isinstance(error, PeerError) and not _is_ours(failure)),
            status=MISUSED if isinstance(error, UsageError) else FAILED,
            at_s=time.time(),
        )

    def show(self, *, as_peer: bool = False) -> None:
        """Print it on standard error: the traceback of user code first, and in any case one line at the end.

        Args:
            as_peer: say in one line why this process stopped, where the one that failed prints the rest.
        """
        failure = self.failure
        if as_peer:
            print(f"error: stopped, because another worker failed: {_first_line(str(failure))}", file=sys.stderr)
            return
        if not self.is_user_code:
            in_step = f" ({failure.where})" if failure.step is not None else ""
            print(f"error: {failure.message}{in_step}", file=sys.stderr)
            return
        if failure.trace:
            print(failure.trace.rstrip(), file=sys.stderr)
        message = f": {_first_line(failure.message)}" if failure.message else ""
        print(f"error: {failure.where}: {failure.error}{message}", file=sys.stderr)


def write_failure(folder: str, report: Report) -> None:
    """Leave a report for the launcher, whole or not at all; this process is about to end and its peers may end it first."""
    path = Path(folder) / f"failure-{os.getpid()}.json"
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(dataclasses.asdict(report)))
    temporary.replace(path)


def write_stop(folder: str, status: int) -> None:
    """Leave for the launcher that this process stopped as it was asked to, together with all others, and the status of that."""
    (Path(folder) / f"stop-{status}-{os.getpid()}").touch()


def read_stop(folder: str) -> int | None:
    """Return the exit status of a run that stopped as it was asked to; None where it did not."""
    return max((int(path.name.split("-")[1]) for path in Path(folder).glob("stop-*")), default=None)


def write_started(folder: str) -> None:
    """Leave for the launcher that this process is there to be asked to stop."""
    (Path(folder) / f"worker-{os.getpid()}").touch()


def read_started(folder: str) -> list[int]:
    """Return the ids of the processes that are there."""
    return [int(path.name.split("-")[1]) for path in Path(folder).glob("worker-*")]


def read_first_failure(folder: str) -> Report | None:
    """Return the earliest report of a process that failed itself, or else of one that only heard of it; None without any."""
    reports = []
    for path in Path(folder).glob("failure-*.json"):
        values = json.loads(path.read_text())
        reports.append(Report(**{**values, "failure": Failure(**values["failure"])}))
    return min(reports, key=lambda report: (not report.is_own, report.at_s), default=None)


def _place(failure: Failure, notes: list[str]) -> Failure:
    """Return `failure` with the rank, step and micro-batch that the engine noted on the exception."""
    for note in notes:
        read = re.fullmatch(r"rank (\d+)(?:, step (\d+))?(?:, micro-batch (\d+))?(?:, (.*))?", note)
        if read:
            rank, step, micro_batch, doing = read.groups()
            return dataclasses.replace(
                failure,
                rank=int(rank),
                step=None if step is None else int(step),
                micro_batch=None if micro_batch is None else int(micro_batch),
                doing=doing or "",
            )
    return failure


def _trace_from_user_code(error: BaseException) -> str:
    """Return the traceback from where Paceline called the user's code on; all of it where it never did."""
    ours = [str(Path(module.__file__).parent) for module in (paceline, typer, concurrent.futures) if module.__file__]
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(tuple(ours)):
        step = step.tb_next
    return "".join(traceback.format_exception(error if step is None else error.with_traceback(step)))


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def _is_ours(failure: Failure) -> bool:
    return failure.error in {"PacelineError", "UsageError", "PlanError", "MismatchError", "DeadlineError", "CheckpointError"}
