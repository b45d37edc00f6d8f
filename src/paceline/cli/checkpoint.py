"""`paceline checkpoint`: looking at what a run has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.checkpoint import Checkpoints, compare, describe
from paceline.checkpoint.weights import CHECKPOINTS
from paceline.cli.resume import find_checkpoint
from paceline.errors import UsageError

DIFFERENT = DAMAGED = 1
SHOWN = 20
PATH_HELP = "A checkpoint, the folder of a run, or a folder of checkpoints."

checkpoint = typer.Typer(help="Look at the checkpoints of runs.", rich_markup_mode=None, no_args_is_help=True)


@checkpoint.command()
def show(path: Annotated[Path, typer.Argument(metavar="PATH", help=PATH_HELP + " Of several, the newest.")]) -> int:
    """Say in a few lines what a checkpoint holds."""
    print(describe(find_checkpoint(path)))
    return 0


@checkpoint.command()
def check(path: Annotated[Path, typer.Argument(metavar="PATH", help=PATH_HELP + " Of several, all.")]) -> int:
    """Verify every byte; exit with 1 where something is damaged."""
    reports = [Checkpoints(one.parent).check(one) for one in _all(path)]
    for report in reports:
        print(report)
    return 0 if all(report.whole for report in reports) else DAMAGED


@checkpoint.command()
def diff(
    path: Annotated[Path, typer.Argument(metavar="PATH", help=PATH_HELP + " Of several, the newest.")],
    path_2: Annotated[
        Path | None, typer.Argument(metavar="[PATH2]", show_default=False, help="The other; by default the one saved before PATH.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help=f"Show all differences, not only the first {SHOWN}.")] = False,
) -> int:
    """Compare two checkpoints to the last bit; exit with 1 where they differ."""
    second = find_checkpoint(path if path_2 is None else path_2)
    first = _before(second) if path_2 is None else find_checkpoint(path)
    differences = compare(*(Checkpoints(one.parent).load(one) for one in (first, second)))
    if not differences:
        print(f"{first} and {second} are the same, to the last bit")
        return 0
    print(f"{first} and {second} differ in {len(differences)} places:")
    shown = differences if show_all else differences[:SHOWN]
    for difference in shown:
        print(f"  {difference}")
    if len(shown) < len(differences):
        print(f"  and {len(differences) - len(shown)} more, which --all shows")
    return DIFFERENT


def _all(path: Path) -> list[Path]:
    """Return the checkpoints that a path names, the one that it is or all that are in it."""
    one = find_checkpoint(path)
    return [one] if one == path else Checkpoints(one.parent).list()


def _before(checkpoint: Path) -> Path:
    """Return the checkpoint that was saved before another, in the same folder."""
    names = [path.name for path in Checkpoints(checkpoint.parent).list()]
    number = names.index(checkpoint.name) if checkpoint.name in names else 0
    if not number:
        raise UsageError(
            f"{checkpoint} has none before it to compare with; pass two paths, or a run that keeps several {CHECKPOINTS}"
        )
    return checkpoint.parent / names[number - 1]
