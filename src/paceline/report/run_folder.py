"""The folder of a run: what was trained, how, what came out. Made only when it is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w
from torch import nn

from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.plan import Plan
from paceline.report.loggers import JsonLines, TensorBoard
from paceline.report.reports import Report
from paceline.report.weights import save_weights, weights_bytes

PLAN, JOB, METRICS, WEIGHTS, EVENTS = "plan.toml", "job.toml", "metrics.jsonl", "model.safetensors", "events"


class RunFolder:
    """A logger that keeps a run in a folder: `plan.toml`, `job.toml`, `metrics.jsonl`, `events/`, `model.safetensors`.

    Only the rank that is `is_main` may use one. Making it touches nothing; `start` makes the folder.

    Args:
        path: the folder.
        overwrite: replace the run that the folder holds; nothing else in it is touched.

    Raises:
        UsageError: the folder holds a run already, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._loggers: list[JsonLines | TensorBoard] = []
        self.check()

    def check(self) -> None:
        """Raise `UsageError` where `start` would, as far as that can be told without writing."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"run folder {self.path} is a file; pass another folder")
        held = [name for name in (PLAN, JOB, METRICS, WEIGHTS) if (self.path / name).exists()]
        if held and not self._overwrite:
            raise UsageError(
                f"run folder {self.path} already holds a run ({', '.join(held)}); pass another folder, or overwrite it: "
                "overwrite=True, on the command line --overwrite"
            )
        nearest = next(folder for folder in (self.path.absolute(), *self.path.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise self._unwritable("permission denied" if nearest.is_dir() else f"{nearest} is a file")

    def start(self, job: Job, plan: Plan, model: nn.Module) -> None:
        """Make the folder and write plan, job and the initial weights, so that a disk that is too small is found now."""
        self.check()
        try:
            self._write_start(job, plan, model)
        except BaseException:
            # Half a run would be in the way of the next try.
            with contextlib.suppress(OSError):
                self._clear()
                self.path.rmdir()
            raise
        self._loggers = [JsonLines(self.path / METRICS)]
        if importlib.util.find_spec("tensorboard") is not None:
            self._loggers.append(TensorBoard(self.path / EVENTS))

    def _write_start(self, job: Job, plan: Plan, model: nn.Module) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear()
            (self.path / PLAN).write_text(plan.to_toml())
            (self.path / JOB).write_text(tomli_w.dumps(_toml(job.describe())))
            save_weights(model, self.path / WEIGHTS)
            # The trained weights are written beside the initial ones before they replace them.
            free, needed = shutil.disk_usage(self.path).free, weights_bytes(model)
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if free < needed:
            raise self._unwritable(f"{free:,} bytes are free, the trained weights need {needed:,}")

    def __call__(self, report: Report) -> None:
        for logger in self._loggers:
            logger(report)

    def finish(self, model: nn.Module) -> None:
        """Write the trained weights.

        Raises:
            PacelineError: they could not be written there; the message says where they are instead.
        """
        try:
            save_weights(model, self.path / WEIGHTS)
        except OSError as error:
            raise self._rescue(model, error) from error

    def close(self) -> None:
        """Close the files of the metrics."""
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def contents(self) -> list[tuple[str, int]]:
        """Return names and sizes in bytes of what the folder holds, event files as one folder."""
        entries = []
        for entry in sorted(self.path.iterdir()):
            if entry.is_dir():
                entries.append((f"{entry.name}/", sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())))
            else:
                entries.append((entry.name, entry.stat().st_size))
        return entries

    def _clear(self) -> None:
        for name in (PLAN, JOB, METRICS, WEIGHTS):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / EVENTS, ignore_errors=True)

    def _rescue(self, model: nn.Module, error: OSError) -> PacelineError:
        why = error.strerror or str(error)
        try:
            rescued = Path(tempfile.mkdtemp(prefix="paceline-weights-")) / WEIGHTS
            save_weights(model, rescued)
        except OSError as second:
            with contextlib.suppress(OSError, UnboundLocalError):
                rescued.parent.rmdir()
            return PacelineError(
                f"cannot write the trained weights to {self.path} ({why}), nor to {tempfile.gettempdir()} "
                f"({second.strerror or second}); free some space and train again"
            )
        return PacelineError(
            f"cannot write the trained weights to {self.path} ({why}); they are in {rescued}: move them to where there is space"
        )

    def _unwritable(self, why: str) -> UsageError:
        return UsageError(f"cannot write run folder {self.path} ({why}); pass a folder that you can write, on a disk with space")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _toml(value: Any) -> Any:
    """Return a value as TOML can hold it: without None, anything foreign as text."""
    if isinstance(value, dict):
        return {str(name): _toml(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_toml(inner) for inner in value if inner is not None]
    return value if isinstance(value, bool | int | float | str) else str(value)
