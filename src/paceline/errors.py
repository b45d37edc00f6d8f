"""Every error that Paceline raises of its own, and the record of a failure that travels between workers.

    PacelineError
     +-- UsageError (ValueError)        what was given cannot be honoured: change the job, the plan or the call
     |    +-- PlanError                 the plan does not parse, or does not fit the workers or the batch
     +-- MismatchError                  ranks disagree: other calls, another model, another batch
     +-- CheckpointError                a checkpoint is damaged or incomplete; `.damage` says how, `.previous` what to use
     +-- PeerError                      another worker failed first; `.failure` says which, where and why
     +-- DeadlineError (TimeoutError)   a wait took longer than it may

An exception from the user's own code is never wrapped: it keeps its type and traceback and gains a note.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHOWN_DAMAGE = 5  # problems of a checkpoint that its message names


class PacelineError(Exception):
    """The root of all errors that Paceline raises of its own."""


class UsageError(PacelineError, ValueError):
    """What was given cannot be honoured; the message says what was given, what is allowed and what to do."""


class PlanError(UsageError):
    """A plan does not parse, or does not fit the workers, the job or the batch."""


class MismatchError(PacelineError):
    """Ranks that must do the same did not: another call, shape, dtype, model or batch."""


class DeadlineError(PacelineError, TimeoutError):
    """A wait for another worker took longer than the transport's time-out."""


class CheckpointError(PacelineError):
    """A checkpoint is damaged, incomplete or of another format; nothing of it was given out.

    Args:
        path: the checkpoint.
        damage: everything that is wrong with it, each naming the file and the tensor.
        previous: the newest checkpoint beside it that is whole, to use instead.
        searched: whether one was looked for.
    """

    def __init__(self, path: Path, damage: Iterable[str], previous: Path | None = None, *, searched: bool = False) -> None:
        self.path, self.damage, self.previous, self.searched = path, tuple(damage), previous, searched
        more = f"; and {len(self.damage) - SHOWN_DAMAGE} more" if len(self.damage) > SHOWN_DAMAGE else ""
        if previous is not None:
            advice = f"; {previous} is whole, use it instead"
        else:
            advice = "; no other checkpoint beside it is whole" if searched else ""
        super().__init__(f"{path} cannot be used: {'; '.join(self.damage[:SHOWN_DAMAGE])}{more}{advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.path, self.damage, self.previous, self.searched)


def _rebuild(path: Path, damage: tuple[str, ...], previous: Path | None, searched: bool) -> CheckpointError:
    return CheckpointError(path, damage, previous, searched=searched)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first thing that went wrong on one worker, in words that can be sent to every other.

    `step` counts optimizer steps from 1, `micro_batch` from 0 within the global batch; both are None
    outside of a step. `trace` is the formatted traceback.
    """

    rank: int
    error: str
    message: str
    step: int | None = None
    micro_batch: int | None = None
    doing: str = ""
    trace: str = ""

    @classmethod
    def of(
        cls, error: BaseException, *, rank: int, step: int | None = None, micro_batch: int | None = None, doing: str = ""
    ) -> Failure:
        """Return the record of `error`; of a `PeerError` the record it carries, so that the first failure stays the first."""
        if isinstance(error, PeerError):
            return error.failure
        return cls(
            rank=rank,
            error=type(error).__name__,
            message=str(error),
            step=step,
            micro_batch=micro_batch,
            doing=doing,
            trace="".join(traceback.format_exception(error)),
        )

    @property
    def where(self) -> str:
        """Where it happened: `rank 1, step 3, micro-batch 2, forward`."""
        parts = [f"rank {self.rank}"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.micro_batch is not None:
            parts.append(f"micro-batch {self.micro_batch}")
        if self.doing:
            parts.append(self.doing)
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.where}: {self.error}: {self.message}"


class PeerError(PacelineError):
    """Another worker failed first, and this one stopped because of it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"stopped because another worker failed: {failure}")
        self.failure = failure

    def __reduce__(self) -> tuple[type[PeerError], tuple[Failure]]:
        return type(self), (self.failure,)
