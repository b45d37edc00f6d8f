"""`paceline export`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from paceline.assembly import build_model
from paceline.checkpoint import Checkpoints, export_weights
from paceline.checkpoint.store import NAME
from paceline.checkpoint.weights import CHECKPOINTS
from paceline.errors import UsageError
from paceline.jobs import find_job


def export(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A run, a checkpoint, or weights that another program wrote.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A .safetensors file; with --job, a new folder.")],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="The job that trained a Hugging Face model, as for train: TARGET becomes a folder that from_pretrained opens.",
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its newest.")] = False,
) -> int:
    """Write a run's weights for other programs: one .safetensors file, or a Hugging Face folder."""
    chosen = _best(source) if best else source
    model = None if job is None else _model(job)
    if model is None and target.suffix != ".safetensors":
        raise UsageError(
            f"{target} does not end in .safetensors; pass a name that does, or --job path.py:function for a Hugging Face folder"
        )
    written = export_weights(chosen, target, model)
    files = [written] if written.is_file() else sorted(file for file in written.rglob("*") if file.is_file())
    print(f"wrote {written}, the weights of {chosen}:")
    for file in files:
        print(f"    {file.name:<32} {file.stat().st_size:>14,} bytes")
    return 0


def _best(source: Path) -> Path:
    for folder in (source / CHECKPOINTS, source):
        best = Checkpoints(folder).best()
        if best is not None:
            return best
    is_checkpoint = NAME.fullmatch(source.name) is not None
    what = "is one checkpoint" if is_checkpoint else "holds no checkpoint that was the best; train with --best METRIC:max or :min"
    raise UsageError(f"--best: {source} {what}; leave --best out to export what is there")


def _model(job: str) -> nn.Module:
    """Return the job's module, to be filled; a file that the job starts from need not be there any more."""
    found = dataclasses.replace(find_job(job), weights=None)
    model = build_model(found)
    if not hasattr(model, "save_pretrained"):
        raise UsageError(
            f"--job {job}: its {type(model).__name__} has no save_pretrained, so it is no Hugging Face model; leave --job out to "
            "write a .safetensors file"
        )
    return model
