"""Where a run goes on: the checkpoint that `--resume` names, what would keep it from being loaded, and how that is told."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import CheckpointError, Checkpoints
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.store import NAME
from paceline.checkpoint.weights import CHECKPOINTS
from paceline.errors import PacelineError, UsageError
from paceline.jobs.find import BUILT_IN
from paceline.trainer import Trainer

OPTION, AUTO, NEWEST = "--resume", "auto", "newest"
WOULD_NOT_LOAD = 1


def spell_out(argv: Sequence[str]) -> list[str]:
    """Return a command line whose bare `--resume` has its value: command-line parsers know none that may be left out.

    It is bare at the end, before another option, and before the job.

    >>> spell_out(["train", "gpt", "--run", "r", "--resume"]), spell_out(["train", "--resume", "auto", "gpt"])
    (['train', 'gpt', '--run', 'r', '--resume=newest'], ['train', '--resume', 'auto', 'gpt'])
    """
    following = [*argv[1:], "--"]
    return [
        f"{OPTION}={NEWEST}" if word == OPTION and (after.startswith("-") or _is_job(after)) else word
        for word, after in zip(argv, following, strict=True)
    ]


def _is_job(word: str) -> bool:
    return ".py:" in word or (word in BUILT_IN and not Path(word).exists())


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Args:
        checkpoint: what it goes on from; None from the beginning.
        in_run: whether that is a checkpoint of the run folder itself, whose files then stay.
        again: whether the run folder's newest checkpoint is another; then this one is saved at once, so that the next `--resume`
            finds the run where it went on and not where it had been.
    """

    checkpoint: Path | None = None
    in_run: bool = False
    again: bool = False


def find_start(resume: str | None, run: Path | None, *, overwrite: bool) -> Start:
    """Return where a run starts by the options of a command line; reads names only.

    Raises:
        UsageError: there is nothing to go on from, or the options contradict each other.
    """
    if resume is None:
        return Start()
    if resume in (AUTO, NEWEST):
        option = OPTION if resume == NEWEST else f"{OPTION} {AUTO}"
        if run is None:
            raise UsageError(f"{option} goes on with the run in a folder; pass --run DIR, or --resume PATH of a checkpoint")
        if overwrite:
            raise UsageError(f"--overwrite throws away the run that {option} goes on with; leave one of them out")
        newest = Checkpoints(run / CHECKPOINTS).latest()
        if newest is None and resume == NEWEST:
            raise UsageError(
                f"--resume: there is no checkpoint in {run / CHECKPOINTS}; leave it out, or pass --resume auto to start anew "
                "where there is none"
            )
        return Start(checkpoint=newest, in_run=newest is not None)
    checkpoint = find_checkpoint(Path(resume))
    newest = None if run is None else Checkpoints(run / CHECKPOINTS).latest()
    in_run = run is not None and checkpoint.resolve().parent == (run / CHECKPOINTS).resolve()
    if in_run and overwrite:
        raise UsageError(f"--overwrite throws away the run that --resume {resume} goes on with; leave one of them out")
    again = run is not None and (newest is None or newest.resolve() != checkpoint.resolve())
    return Start(checkpoint=checkpoint, in_run=in_run, again=again)


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run or of a folder of checkpoints.

    Raises:
        UsageError: there is none.
    """
    if path.is_dir():
        if (path / MANIFEST).exists() or NAME.fullmatch(path.name):
            return path
        for folder in (path / CHECKPOINTS, path):
            newest = Checkpoints(folder).latest()
            if newest is not None:
                return newest
    there = f"there is no checkpoint in {path}" if path.is_dir() else f"there is no folder {path}"
    raise UsageError(f"{there}; pass a checkpoint such as RUN/{CHECKPOINTS}/step-00000100, or the folder of a run that has some")


def go_on(trainer: Trainer, checkpoint: Path, say: Callable[[str], None], argv: Sequence[str]) -> None:
    """Load a checkpoint into a trainer and say so. Every rank calls it.

    Raises:
        PacelineError: it is damaged; the message names the damage, and the command that goes on from a whole one.
        UsageError: it is of another model, optimizer or place in other data.
    """
    try:
        remarks = trainer.load(checkpoint)
    except CheckpointError as error:
        raise _with_command(error, argv) from error
    say(f"resume     {checkpoint}, after step {trainer.steps_done}, in epoch {trainer.position.epoch}")
    for remark in remarks:
        say(f"           {remark}")


def check(trainer: Trainer, checkpoint: Path | None, say: Callable[[str], None], argv: Sequence[str]) -> int:
    """Say whether a checkpoint would be loaded, what differs and what is missing; return the exit status. Every rank calls it."""
    if checkpoint is None:
        say("there is no checkpoint yet: it would start anew")
        return 0
    try:
        problems, remarks = trainer.check(checkpoint)
    except CheckpointError as error:
        raise _with_command(error, argv) from error
    say(f"{checkpoint} {'would not load' if problems else 'would load: every tensor is whole and fits'}")
    for problem in problems:
        say(f"  problem  {problem}")
    for remark in remarks:
        say(f"  differs  {remark}")
    return WOULD_NOT_LOAD if problems else 0


def command_to_go_on(argv: Sequence[str], checkpoint: Path | None = None) -> str:
    """Return the command that goes on with the run that `argv` started, from a checkpoint, or from its newest."""
    words, skip = [], False
    for word in argv:
        if skip or word in ("--overwrite", "--check") or word.startswith(f"{OPTION}="):
            skip = False
        elif word == OPTION:
            skip = True
        else:
            words.append(word)
    return shlex.join(["paceline", *words, OPTION, *([] if checkpoint is None else [str(checkpoint)])])


def _with_command(error: CheckpointError, argv: Sequence[str]) -> PacelineError:
    if error.previous is None:
        return error
    return PacelineError(f"{error}: {command_to_go_on(argv, error.previous)}")
