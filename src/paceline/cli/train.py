"""`paceline train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.console import Console

from paceline.cli.choices import Choices
from paceline.cli.launch import run_in_processes
from paceline.errors import UsageError
from paceline.report.progress import ProgressBar, describe_evaluation
from paceline.report.reports import Logger
from paceline.report.run_folder import RunFolder
from paceline.trainer import Trainer


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
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep plan, metrics and weights in this folder.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline that Perfetto opens.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait of a worker for another.")] = 600.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> int:
    """Train a job, in this process or in several that this command starts; under torchrun or srun, join."""
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g} is not above 0; pass seconds")
    changes: dict[str, Any] = {name: value for name, value in (("batch_size", batch_size), ("seed", seed)) if value is not None}
    if steps is not None or epochs is not None:
        changes |= {"steps": steps, "epochs": epochs}
    choices = Choices.of(job, plan=plan, plan_file=plan_file, transport=transport, workers=workers, changes=changes)
    # Both are looked at before any process is started, so that a mistake is told at once and once.
    if trace is not None and not trace.absolute().parent.is_dir():
        raise UsageError(f"--trace {trace} lies in a folder that does not exist; make it, or pass another file")
    if run is not None and choices.start != "join":
        RunFolder(run, overwrite=overwrite)
    if choices.start == "processes":
        return run_in_processes(context.obj, choices.num_workers)
    with ExitStack() as stack:
        trainer = stack.enter_context(
            Trainer(choices.job, choices.plan, transport=transport, timeout_s=timeout, trace=trace is not None)
        )
        folder = None
        if run is not None and trainer.is_main:
            folder = stack.enter_context(RunFolder(run, overwrite=overwrite))
        # The other ranks take part and say nothing.
        run_training(trainer, folder, Console(quiet=quiet or not trainer.is_main))
        if trace is not None:
            write_trace(trainer, trace)
    return 0


def run_training(trainer: Trainer, folder: RunFolder | None, console: Console) -> None:
    """Train from the first step to the last, and show and keep what comes of it. Every rank calls it."""
    job = trainer.job
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(trainer.describe())
    if folder is not None:
        folder.start(job, trainer.plan, trainer.model)
    loggers: list[Logger] = [] if folder is None else [folder]
    evaluate(trainer, "before", loggers, say)
    with ProgressBar(lambda: trainer.total_steps, console=console) as bar:
        trainer.fit(loggers=[*loggers, bar] if trainer.is_main else [])
    evaluate(trainer, "after", loggers, say)
    if folder is not None:
        folder.finish(trainer.model)
    if job.sample is not None and trainer.is_main:
        say(f"sample:\n{indent(job.sample(trainer.model), '    ')}")
    if folder is not None:
        say(f"run folder {folder.path}:")
        for name, size in folder.contents():
            say(f"    {name:<20} {size:>12,} bytes")


def evaluate(trainer: Trainer, when: str, loggers: Sequence[Logger], say: Callable[[str], None]) -> None:
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
