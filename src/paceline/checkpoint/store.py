"""The checkpoints of a run: a folder of folders, saved and pruned so that what is there can always be gone back to."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from paceline.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from paceline.checkpoint.parts import Parts
from paceline.checkpoint.publish import clean, flush_folder, locked, publish, remove, telling, writing
from paceline.checkpoint.reading import read_state
from paceline.checkpoint.state import State
from paceline.checkpoint.tensor_files import write_text
from paceline.errors import CheckpointError, UsageError

Paths: TypeAlias = "list[Path]"
NAME = re.compile(r"step-(?P<step>\d{8,})(?:\.(?P<again>\d+))?")
SHARD_BYTES = 5 * 10**9  # what Hugging Face's own tools write
KEPT = 3


class _Saved(NamedTuple):
    """A checkpoint in the folder; sorted, the one that was saved last is last."""

    saved_ns: int
    step: int
    again: int
    path: Path
    best: bool
    readable: bool


_Order: TypeAlias = "list[_Saved]"


@dataclass(frozen=True)
class CheckReport:
    """What `check` found: the damage, and how much was looked at."""

    path: Path
    damage: tuple[str, ...]
    files: int = 0
    tensors: int = 0
    size: int = 0

    @property
    def whole(self) -> bool:
        """Whether every byte is as it was saved."""
        return not self.damage

    def __str__(self) -> str:
        if self.whole:
            return f"{self.path} is whole: {self.files} files, {self.tensors} tensors, {self.size:,} bytes"
        return "\n".join([f"{self.path} is damaged:", *(f"  {problem}" for problem in self.damage)])


class Checkpoints:
    """The checkpoints in a folder, each a folder `step-00000123` that is published whole or not at all.

    Making one touches nothing. Any number of processes may save into one folder and read from it.

    Args:
        folder: where they are; made by the first `save`.

    >>> import tempfile
    >>> temporary = tempfile.TemporaryDirectory()
    >>> checkpoints = Checkpoints(temporary.name)
    >>> path = checkpoints.save(State(weights={"w": torch.ones(2)}, progress={"steps_done": 3}))
    >>> path.name, sorted(file.name for file in path.iterdir())
    ('step-00000003', ['checkpoint.json', 'model.safetensors', 'state.json'])
    >>> checkpoints.load(checkpoints.latest()).weights
    {'w': tensor([1., 1.])}
    >>> temporary.cleanup()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def save(self, state: State, *, keep: int | None = KEPT, best: bool = False, shard_bytes: int = SHARD_BYTES) -> Path:
        """Save a state and return its folder; then remove all but the newest `keep` checkpoints and the best.

        Whoever is killed at whatever moment leaves the earlier checkpoints whole and this one whole or absent. A checkpoint of
        the same step is replaced. The tensors must not change until this returns; `snapshot` makes copies that do not.

        Args:
            state: what to save.
            keep: how many to keep, this one included; None keeps all.
            best: this is the best so far: it is kept until a better one is saved.
            shard_bytes: largest size of a file of weights or of optimizer state, unless one tensor is larger.

        Raises:
            UsageError: the state holds what cannot be stored, or the disk is full or cannot be written.
        """
        if keep is not None and keep < 1:
            raise UsageError(
                f"keep={keep} was given: at least the checkpoint that is being saved is kept; pass 1 or more, or None for all"
            )
        if shard_bytes < 1:
            raise UsageError(f"shard_bytes={shard_bytes} was given; pass a number of bytes above 0")
        parts = Parts.of(state, shard_bytes)
        name = f"step-{state.steps_done:08d}"
        with telling(self.folder / name, lambda: parts.size):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                flush_folder(self.folder.parent)
            with locked(self.folder):
                clean(self.folder)
            with writing(self.folder, name) as hidden:
                texts, files = parts.write(hidden)
                manifest = Manifest(
                    steps_done=state.steps_done, saved_ns=0, best=best, texts=texts, files=files, aliases=parts.aliases
                )
                with locked(self.folder):
                    path = self._publish(hidden, name, manifest)
                    self._prune(keep)
        return path

    def _publish(self, hidden: Path, name: str, manifest: Manifest) -> Path:
        others = self._saved()
        # Later than all others even where clocks disagree or a run has gone back to an earlier step.
        saved_ns = max([time.time_ns(), *(other.saved_ns + 1 for other in others)])
        write_text(hidden / MANIFEST, replace(manifest, saved_ns=saved_ns).to_json())
        again = max((other.again + 1 for other in others if other.step == manifest.steps_done), default=0)
        path = self.folder / (f"{name}.{again}" if again else name)
        publish(hidden, path)
        return path

    def list(self) -> Paths:
        """Return the checkpoints in the order in which they were saved, damaged ones included."""
        return [saved.path for saved in self._saved()]

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last; None where there is none."""
        return next(iter(reversed(self.list())), None)

    def best(self) -> Path | None:
        """Return the checkpoint that was last saved as the best; None where there is none."""
        return next((saved.path for saved in reversed(self._saved()) if saved.best), None)

    def prune(self, keep: int) -> Paths:
        """Remove all but the newest `keep` checkpoints and the best, and return what was removed."""
        if not self.folder.is_dir():
            return []
        with locked(self.folder):
            clean(self.folder)
            return self._prune(keep)

    def _prune(self, keep: int | None) -> Paths:
        saved = self._saved()
        # What cannot be read takes nobody's place and is left to whoever wants to look at it.
        readable = [one for one in saved if one.readable]
        newest_of_step = {one.step: one.path for one in readable}
        current = [one for one in readable if newest_of_step[one.step] == one.path]
        kept = {one.path for one in (current if keep is None else current[-keep:])}
        kept |= {one.path for one in readable if one.best and not any(o.best and o.saved_ns > one.saved_ns for o in readable)}
        removed = [one.path for one in readable if one.path not in kept]
        for path in removed:
            remove(path)
        return removed

    def load(self, path: str | os.PathLike[str] | None = None) -> State:
        """Return the state of a checkpoint, by default the latest, after every byte of it has been verified.

        Raises:
            CheckpointError: it is damaged; the error names the damage and the newest other checkpoint that is whole.
            UsageError: there is none.
        """
        path = self.latest() if path is None else Path(path)
        if path is None:
            raise UsageError(f"there is no checkpoint in {self.folder}; pass the folder that a run saved into")
        if not path.is_dir():
            raise UsageError(f"there is no checkpoint {path}; {self._have()}")
        try:
            return read_state(path)
        except CheckpointError as error:
            raise CheckpointError(path, error.damage, self.whole_besides(path), searched=True) from error

    def check(self, path: str | os.PathLike[str]) -> CheckReport:
        """Verify every byte of a checkpoint and report what is wrong; nothing is raised for damage."""
        path = Path(path)
        try:
            read_state(path)
            manifest = read_manifest(path)
        except CheckpointError as error:
            return CheckReport(path, error.damage)
        tensors = sum(len(file.tensors) for file in manifest.files.values())
        return CheckReport(path, (), len(manifest.sizes) + 1, tensors, sum(manifest.sizes.values()))

    def whole_besides(self, path: Path) -> Path | None:
        """Return the newest checkpoint other than `path` that is whole; None where none is."""
        others = [saved.path for saved in reversed(self._saved()) if saved.path.resolve() != path.resolve()]
        return next((other for other in others if self.check(other).whole), None)

    def _have(self) -> str:
        names = [path.name for path in self.list()]
        return f"{self.folder} holds {', '.join(names)}" if names else f"{self.folder} holds none"

    def _saved(self) -> _Order:
        found = []
        try:
            entries = list(self.folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        for entry in entries:
            read = NAME.fullmatch(entry.name)
            if read is None:
                continue
            step, again = int(read["step"]), int(read["again"] or 0)
            try:
                manifest = read_manifest(entry)
                found.append(_Saved(manifest.saved_ns, step, again, entry, manifest.best, True))
            except CheckpointError:
                try:
                    found.append(_Saved(entry.stat().st_mtime_ns, step, again, entry, False, False))
                except OSError:  # removed meanwhile
                    continue
        return sorted(found)
