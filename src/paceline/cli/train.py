"""`paceline train`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.checkpoint import Checkpoints
from paceline.cli.choices import Choices
from paceline.cli.keeping import Keeping
from paceline.cli.launch import run_in_processes
from paceline.cli.resume import Start, check, command_to_go_on, find_start, go_on
from paceline.errors import UsageError
from paceline.report.progress import ProgressBar, describe_evaluation
from paceline.report.reports import Logger
from paceline.report.run_folder import RunFolder
from paceline.trainer import Trainer
from paceline.transport.environment import Environment

INTERRUPTED = 130
Say = Callable[[str], None]


def train(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="gpt, digits, or path.py:function that returns a paceline.Job.")],
    plan: Annotated[str | None, typer.Option(metavar="TEXT", help="For example replicas=2,micro_batches=4.")] = None,
    plan_file: Annotated[Path | None, typer.Option(metavar="TOML", help="The plan as TOML, instead of --plan.")] = None,
    transport: Annotated[str | None, typer.Option(metavar="processes|threads", help="What the workers are.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="How many; by default what the plan needs.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Optimizer steps, instead of the job's own length.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data, instead of the job's own.")] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Rows per step, over all workers together.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Start of every random stream.")] = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep plan, metrics, weights and checkpoints there.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between checkpoints; 100 with --run.")] = None,
    keep: Annotated[int | None, typer.Option(metavar="N", help="How many checkpoints stay, besides the best; 3.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between looks at held-out data.")] = None,
    best: Annotated[str | None, typer.Option(metavar="METRIC[:max|:min]", help="Keep the best one's checkpoint.")] = None,
    patience: Annotated[int | None, typer.Option(metavar="N", help="Stop after N evaluations without a better one.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto|PATH]",
            help="Go on with the run in --run, from its newest checkpoint; auto: or start it where it has none; "
            "PATH: from that checkpoint or run.",
        ),
    ] = None,
    only_check: Annotated[bool, typer.Option("--check", help="With --resume: say whether it would load, train nothing.")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline that Perfetto opens.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait of a worker for another.")] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> int:
    """Train a job, in this process or in several that this command starts; under torchrun or srun, join.

    SIGTERM and Ctrl-C finish the step and save it; a second one leaves at once.
    """
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} is not above 0; pass seconds")
    if only_check and resume is None:
        raise UsageError("--check says whether a checkpoint would load; name one with --resume")
    changes: dict[str, Any] = {name: value for name, value in (("batch_size", batch_size), ("seed", seed)) if value is not None}
    if steps is not None or epochs is not None:
        changes |= {"steps": steps, "epochs": epochs}
    choices = Choices.of(job, plan=plan, plan_file=plan_file, transport=transport, workers=workers, changes=changes)
    keeping = Keeping.of(
        choices.job, run=run, save_every=save_every, keep=keep, evaluate_every=evaluate_every, best=best, patience=patience
    )
    # All of this is looked at before any process is started, so that a mistake is told at once and once.
    if trace is not None and not trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace} lies in a folder that does not exist; make it, or pass another file")
    find = partial(find_start, resume, run, overwrite=overwrite)
    if choices.start != "join":
        start = find()
        if run is not None and not only_check:
            RunFolder(run, overwrite=overwrite, resume=_takes_up(start, resume))
    if choices.start == "processes" and not only_check:
        return run_in_processes(context.obj, choices.num_workers)
    with ExitStack() as stack:
        # What --transport says is settled: one worker needs no process of its own, and a joined run has its transport.
        trainer = stack.enter_context(Trainer(choices.job, choices.plan, timeout_s=timeout, trace=trace is not None))
        # The other ranks take part and say nothing.
        console = Console(quiet=quiet or not trainer.is_main)
        # Ranks on other hosts may see another state of the files; what the main one sees counts for all.
        start = trainer.from_main(find, "looking for checkpoints")
        if only_check:
            return check(trainer, start.checkpoint, partial(_say, console), context.obj)
        folder = None
        if run is not None and trainer.is_main:
            folder = stack.enter_context(RunFolder(run, overwrite=overwrite, resume=_takes_up(start, resume)))
        status = run_training(trainer, folder, console, keeping, start, context.obj)
        if trace is not None:
            write_trace(trainer, trace)
    return status


def run_training(
    trainer: Trainer, folder: RunFolder | None, console: Console, keeping: Keeping, start: Start, argv: Sequence[str]
) -> int:
    """Train from where the run stands to its end, show and keep what comes of it; return the exit status. Every rank calls it."""
    job = trainer.job
    say = partial(_say, console)
    say(trainer.describe())
    if start.checkpoint is not None:
        go_on(trainer, start.checkpoint, say, argv)
    if folder is not None and start.in_run:
        folder.go_on(job, trainer.plan, trainer.steps_done)
    elif folder is not None:
        folder.start(job, trainer.plan, trainer.model)
    if start.again and keeping.checkpoints is not None:
        trainer.save(keeping.checkpoints, keep=keeping.keep)
    loggers: list[Logger] = [] if folder is None else [folder]
    if start.checkpoint is None:
        evaluate(trainer, "before", loggers, say)
    try:
        fit(trainer, folder, console, keeping)
    except (KeyboardInterrupt, SystemExit) as stop:
        if not trainer.stopped:
            raise
        if trainer.is_main:
            print(_how_to_go_on(trainer, keeping, argv), file=sys.stderr)
        return stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else INTERRUPTED
    best = keeping.best
    if best is not None and trainer.job_steps is not None and trainer.steps_done < trainer.job_steps:
        say(f"stopped early after step {trainer.steps_done}: no better {best.metric} in {best.patience} evaluations")
    evaluate(trainer, "after", loggers, say)
    if folder is not None:
        folder.finish(trainer.model, trainer.steps_done)
    if job.sample is not None and trainer.is_main:
        say(f"sample:\n{indent(job.sample(trainer.model), '    ')}")
    if folder is not None:
        _show_folder(folder, say)
    return 0


def fit(trainer: Trainer, folder: RunFolder | None, console: Console, keeping: Keeping) -> None:
    """Take the steps that are left. Weights that do not fit on the run folder's disk any more are put elsewhere."""
    loggers: list[Logger] = [] if folder is None else [folder]
    try:
        with _leaving_at_once(console, trainer), ProgressBar(lambda: trainer.total_steps, console=console) as bar:
            trainer.fit(loggers=[*loggers, bar] if trainer.is_main else [], **keeping.for_fit())
    except UsageError as error:
        if folder is None or not isinstance(error.__cause__, OSError):
            raise
        raise folder.rescue(trainer.model, trainer.steps_done, error.__cause__) from error


def evaluate(trainer: Trainer, when: str, loggers: Sequence[Logger], say: Say) -> None:
    """Show and log what the job's held-out data says, where it has any. Every rank calls it."""
    if trainer.job.held_out is None:
        return
    report = trainer.evaluate()
    say(f"{describe_evaluation(report)} ({when} training, {report.rows:,} samples)")
    for logger in loggers:
        logger(report)


def write_trace(trainer: Trainer, path: Path) -> None:
    """Write the timeline of all workers. Every rank calls it."""
    timeline = trainer.gather_trace()
    if not trainer.is_main:
        return
    try:
        path.write_text(timeline.to_chrome())
    except OSError as error:
        raise UsageError(f"cannot write trace {path} ({error.strerror}); pass a file that you can write") from error


@contextlib.contextmanager
def _leaving_at_once(console: Console, trainer: Trainer) -> Iterator[None]:
    """Let a second Ctrl-C end the process where it stands: as an exception it would wait for what worker threads are doing."""

    def leave(number: int, frame: FrameType | None) -> None:
        console.show_cursor()
        if Environment.detect(os.environ) is None:  # else whoever started the workers says it, once for all
            print(f"error: interrupted in step {trainer.steps_done + 1}, without saving it", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _takes_up(start: Start, resume: str | None) -> bool:
    """Return whether a run folder may hold a run already: the one to go on with, or one that was ended before it could save."""
    return start.in_run or resume == "auto"


def _how_to_go_on(trainer: Trainer, keeping: Keeping, argv: Sequence[str]) -> str:
    stopped = f"stopped after step {trainer.steps_done}"
    if keeping.checkpoints is None:
        return f"{stopped}; nothing was saved: train with --run DIR to be able to go on"
    newest = Checkpoints(keeping.checkpoints).latest()
    return f"{stopped}, saved in {newest}; go on with: {command_to_go_on(argv)}"


def _show_folder(folder: RunFolder, say: Say) -> None:
    best = folder.checkpoints.best()
    if best is not None:
        say(f"best       {best}")
    say(f"run folder {folder.path}:")
    for name, size in folder.contents():
        say(f"    {name:<20} {size:>12,} bytes")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
