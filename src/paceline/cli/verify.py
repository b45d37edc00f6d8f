"""`paceline verify`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.choices import Choices
from paceline.cli.launch import run_in_processes
from paceline.errors import UsageError
from paceline.jobs import find_job
from paceline.trainer import Trainer
from paceline.verify import Comparison, StepRecord, Verdict, record
from paceline.verify import verify as prove

DIFFERENT = 1


def verify(
    job: Annotated[str, typer.Argument(metavar="JOB", help="gpt, digits, or path.py:function that returns a paceline.Job.")],
    plan: Annotated[str, typer.Option(metavar="TEXT", help="The plan to prove, for example replicas=2,micro_batches=4.")],
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps to compare.")] = 3,
    transport: Annotated[str | None, typer.Option(metavar="processes|threads", help="What the workers are.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict there as JSON.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest wait of a worker for another.")] = 600.0,
    records: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> int:
    """Prove that a job under a plan is the job on one device: losses, gradients, weights and buffers, step by step."""
    choices = Choices.of(job, plan=plan, plan_file=None, transport=transport, workers=None, changes={})
    if steps < 1:
        raise UsageError(f"--steps {steps} is not at least 1; there is nothing to compare")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file} lies in a folder that does not exist; make it, or pass another file")
    if choices.start == "join":
        if records is None:
            raise UsageError("verify starts its own processes; run it without torchrun or srun")
        _record(choices, steps, records, timeout)
        return 0
    run = None
    if choices.start == "processes":
        with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
            argv = ["verify", job, "--plan", plan, "--steps", str(steps), "--timeout", str(timeout), "--records", folder]
            status = run_in_processes(argv, choices.num_workers)
            if status:
                return status
            run = StepRecord.load_all(Path(folder))
    verdict = prove(lambda: find_job(job), choices.plan, steps, run)
    where = "processes" if choices.start == "processes" else "threads"
    _show(verdict, f"{choices.num_workers} {where}" if choices.num_workers > 1 else "1 worker")
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(verdict.as_dict(), indent=2))
        except OSError as error:
            raise UsageError(f"cannot write {json_file} ({error.strerror}); pass a file that you can write") from error
    return 0 if verdict.passed else DIFFERENT


def _record(choices: Choices, steps: int, folder: Path, timeout: float) -> None:
    """Take part in the run under the plan; the main process writes what it did."""
    with Trainer(choices.job, choices.plan, timeout_s=timeout) as trainer:
        for entry in record(trainer, steps):
            if trainer.is_main:
                entry.save(folder)


def _show(verdict: Verdict, workers: str) -> None:
    console = Console(highlight=False)
    console.print(_table(f"{verdict.plan} on {workers}, against one worker with the same micro-batches", verdict.layouts))
    promised = "the same bits" if verdict.exact else "equal to rounding"
    found = "bit-identical" if verdict.layouts.identical else "equal to rounding"
    if verdict.layouts.violation is None:
        console.print(f"layouts   promised {promised}; found {found}", markup=False, soft_wrap=True)
    else:
        console.print(f"DIFFERENT promised {promised}; first {verdict.layouts.violation}", markup=False, soft_wrap=True)
    plain = verdict.plain
    if plain.comparison is None:
        console.print(f"UNPROVEN  no plain loop to compare with: {plain.why_not}", markup=False, soft_wrap=True)
        return
    console.print(_table(f"One worker, against a plain PyTorch loop over the {plain.pieces}, FP64, no masks", plain.comparison))
    if plain.comparison.violation is None:
        console.print("plain     promised equal to 1e-12; found so", markup=False, soft_wrap=True)
    else:
        console.print(f"DIFFERENT promised equal to 1e-12; first {plain.comparison.violation}", markup=False, soft_wrap=True)


def _table(title: str, comparison: Comparison) -> Table:
    caption = "largest absolute difference, and how many of the tensors differ at all"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for column in ("step", "loss", "reference", "gradients", "weights", "buffers"):
        table.add_column(column, justify="right")
    for step in comparison.steps:
        cells = [f"{step.largest[kind]:.0e} {step.differing[kind]}/{step.tensors[kind]}" for kind in step.largest]
        table.add_row(str(step.step), f"{step.losses[0]:.9g}", f"{step.losses[1]:.9g}", *cells)
    return table
