"""What is raised where a checkpoint cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.errors import PacelineError

SHOWN = 5


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
        more = f"; and {len(self.damage) - SHOWN} more" if len(self.damage) > SHOWN else ""
        if previous is not None:
            advice = f"; {previous} is whole, use it instead"
        else:
            advice = "; no other checkpoint beside it is whole" if searched else ""
        super().__init__(f"{path} cannot be used: {'; '.join(self.damage[:SHOWN])}{more}{advice}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.path, self.damage, self.previous, self.searched)


def _rebuild(path: Path, damage: tuple[str, ...], previous: Path | None, searched: bool) -> CheckpointError:
    return CheckpointError(path, damage, previous, searched=searched)
