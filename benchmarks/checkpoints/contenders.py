"""What each contender's process does: one save, or one load, of a model and its optimizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.checkpoints.formats import FORMATS, files_of, flush, remove
from benchmarks.checkpoints.subjects import KINDS, Subject
from benchmarks.harness import JSON, Contender, Stepper, memory_of_process
from paceline.checkpoint import State, snapshot

HERE = "benchmarks.checkpoints.contenders"
SNAPSHOT = "paceline snapshot, nothing written"
TORCH_SAVE, WRITING = "torch.save, fsync", "writing the bytes, fsync"
TORCH_LOAD, READING = "torch.load", "reading the bytes"


class _Held:
    """What a step has left, as the fingerprint that model and optimizer have once it has been put back."""

    def __init__(self, subject: Subject, put_back: Callable[[], None] | None = None) -> None:
        self._subject, self._put_back = subject, put_back

    def __float__(self) -> float:
        if self._put_back is not None:
            self._subject.wipe()
            self._put_back()
        return float(self._subject.fingerprint())


class _OnSubject(Stepper):
    """A stepper that notes how much memory the process held with everything built, and forgets the peak before that."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.built()

    def built(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
        self._built_bytes = memory_of_process()["now_bytes"]

    def notes(self) -> JSON:
        return {"built_bytes": self._built_bytes}


class Saves(_OnSubject):
    """Saves below `folder`, each time in place of the one before, which is removed once the new one is there."""

    def __init__(self, subject: Subject, way: str, folder: Path) -> None:
        super().__init__(subject)
        self._format, self._folder = FORMATS[way], folder
        self._path: Path | None = None

    def step(self) -> _Held:
        self.subject.steps_done += 1
        before, self._path = self._path, self._format.save(self.subject, self._folder)
        if before is not None:
            remove(before)
        path = self._path
        return _Held(self.subject, lambda: self._format.load(self.subject, path))

    def rest(self) -> None:
        # What the system has yet to write would slow the next contender down.
        assert self._path is not None
        for file in files_of(self._path):
            flush(file)

    def notes(self) -> JSON:
        assert self._path is not None
        return {**super().notes(), "file_bytes": sum(file.stat().st_size for file in files_of(self._path))}

    def close(self) -> None:
        if self._path is not None:
            remove(self._path)


class Loads(_OnSubject):
    """Loads one checkpoint again and again until model and optimizer hold it."""

    def __init__(self, subject: Subject, way: str, folder: Path) -> None:
        self._format = FORMATS[way]
        self._path = self._format.save(subject, folder)
        subject.wipe()
        super().__init__(subject)

    def step(self) -> _Held:
        self._format.load(self.subject, self._path)
        return _Held(self.subject)

    def close(self) -> None:
        remove(self._path)


class Snapshots(_OnSubject):
    """Copies everything, as one does to save it while training goes on."""

    _copy: State | None = None

    def step(self) -> _Held:
        self._copy = copied = snapshot(self.subject.state())
        return _Held(self.subject, lambda: self.subject.put_back(copied))

    def rest(self) -> None:
        self._copy = None


def saves(rank: int, *, kind: str, seed: int, way: str, folder: str) -> Saves:
    """Return a process that saves."""
    return Saves(KINDS[kind].build(seed), way, _own(folder))


def loads(rank: int, *, kind: str, seed: int, way: str, folder: str) -> Loads:
    """Return a process that loads."""
    return Loads(KINDS[kind].build(seed), way, _own(folder))


def snapshots(rank: int, *, kind: str, seed: int) -> Snapshots:
    """Return a process that copies."""
    return Snapshots(KINDS[kind].build(seed))


def _own(folder: str) -> Path:
    own = Path(folder) / str(os.getpid())
    own.mkdir(exist_ok=True)
    return own


def contenders(kind: str, seed: int, *, folder: str, threads: int, only: Collection[str] | None = None) -> list[Contender]:
    """Return who takes part, in the order of the tables; all, or `only` those."""
    settings = {"kind": kind, "seed": seed}

    def one(name: str, does: str, way: str) -> Contender:
        return Contender(name, f"{HERE}:{does}", 1, threads, settings | {"way": way, "folder": folder})

    everyone = [
        one("paceline Checkpoints.save", "saves", "paceline"),
        Contender(SNAPSHOT, f"{HERE}:snapshots", 1, threads, settings),
        one("torch.save", "saves", "torch"),
        one(TORCH_SAVE, "saves", "torch, flushed"),
        one("torch.distributed.checkpoint.save", "saves", "distributed"),
        one(WRITING, "saves", "bytes"),
        one("paceline Checkpoints.load", "loads", "paceline"),
        one(TORCH_LOAD, "loads", "torch"),
        one("torch.distributed.checkpoint.load", "loads", "distributed"),
        one(READING, "loads", "bytes"),
    ]
    return [contender for contender in everyone if only is None or contender.name in only]


def does(contender: Contender) -> str:
    """Return `save` or `load`: in which table a contender stands."""
    return "load" if contender.function.endswith(":loads") else "save"
