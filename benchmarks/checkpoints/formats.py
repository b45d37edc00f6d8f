"""The ways to have a model and its optimizer on disk, each as its documentation says."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.checkpoints.subjects import Subject
from paceline.checkpoint import Checkpoints


class Format(Protocol):
    """A way to save and to load."""

    def save(self, subject: Subject, folder: Path) -> Path:
        """Write the subject below `folder` and return the new file or folder, named after its number of steps."""

    def load(self, subject: Subject, path: Path) -> None:
        """Make the subject what was saved."""


class PacelineFormat:
    """`Checkpoints`."""

    def save(self, subject: Subject, folder: Path) -> Path:
        return Checkpoints(folder).save(subject.state(), keep=1)

    def load(self, subject: Subject, path: Path) -> None:
        subject.put_back(Checkpoints(path.parent).load(path))


class TorchFormat:
    """`torch.save` of the two state dicts, as a tutorial has it, or with file and folder flushed to the disk."""

    def __init__(self, *, flush: bool) -> None:
        self._flush = flush

    def save(self, subject: Subject, folder: Path) -> Path:
        path = folder / f"step-{subject.steps_done:08d}.pt"
        state = {
            "model": subject.model.state_dict(),
            "optimizer": subject.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "steps_done": subject.steps_done,
        }
        with path.open("wb") as file:
            torch.save(state, file)
            if self._flush:
                file.flush()
                os.fsync(file.fileno())
        if self._flush:
            flush(folder)
        return path

    def load(self, subject: Subject, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        subject.model.load_state_dict(state["model"])
        subject.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])


class DistributedFormat:
    """`torch.distributed.checkpoint` in a single process, its defaults: it flushes its files too."""

    def save(self, subject: Subject, folder: Path) -> Path:
        path = folder / f"step-{subject.steps_done:08d}"
        save(self._state(subject), checkpoint_id=path, no_dist=True)
        return path

    def load(self, subject: Subject, path: Path) -> None:
        state = self._state(subject)
        load(state, checkpoint_id=path, no_dist=True)
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(subject.model, subject.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        torch.set_rng_state(state["random"])

    def _state(self, subject: Subject) -> dict[str, Any]:
        model, optimizer = get_state_dict(subject.model, subject.optimizer)
        return {"model": model, "optimizer": optimizer, "random": torch.get_rng_state(), "steps_done": subject.steps_done}


class BytesFormat:
    """The limit: the bytes of the tensors one after the other, flushed to the disk, or read into where they were."""

    def save(self, subject: Subject, folder: Path) -> Path:
        path = folder / f"step-{subject.steps_done:08d}.bytes"
        with path.open("wb") as file:
            for content in subject.contents():
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        flush(folder)
        return path

    def load(self, subject: Subject, path: Path) -> None:
        with path.open("rb") as file:
            for content in subject.contents():
                file.readinto(content)


FORMATS: dict[str, Format] = {
    "paceline": PacelineFormat(),
    "torch": TorchFormat(flush=False),
    "torch, flushed": TorchFormat(flush=True),
    "distributed": DistributedFormat(),
    "bytes": BytesFormat(),
}


def files_of(path: Path) -> list[Path]:
    """Return a checkpoint's files."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint, where it is still there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
