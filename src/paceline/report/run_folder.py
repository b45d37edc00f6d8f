"""The folder of a run: what was trained, how, what came out. Made only when it is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w
from safetensors import SafetensorError, safe_open
from torch import nn

from paceline.checkpoint import Checkpoints, State, export_weights
from paceline.checkpoint.weights import CHECKPOINTS, STEPS_DONE, WEIGHTS
from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.plan import Plan
from paceline.report.loggers import JsonLines, TensorBoard
from paceline.report.reports import EvaluationReport, Report

PLAN, JOB, METRICS, EVENTS = "plan.toml", "job.toml", "metrics.jsonl", "events"


class RunFolder:
    """A logger that keeps a run in a folder: plan, job, metrics, events, weights; checkpoints lie in it too.

    Only the rank that is `is_main` may use one. Making it touches nothing; `start` makes the folder, `go_on` takes up its run.

    Args:
        path: the folder.
        overwrite: replace the run that the folder holds; nothing else in it is touched.
        resume: the folder may hold a run, to go on with it from one of its checkpoints, or to start it again where it was ended
            before it had any.

    Raises:
        UsageError: the folder holds a run already, or cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = Path(path)
        self._overwrite, self._resume = overwrite, resume
        self._loggers: list[JsonLines | TensorBoard] = []
        self._evaluated: set[int] = set()
        self.check()

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.path / CHECKPOINTS)

    def check(self) -> None:
        """Raise `UsageError` where `start` would, as far as that can be told without writing."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"run folder {self.path} is a file; pass another folder")
        held = [name for name in (PLAN, JOB, METRICS, WEIGHTS, CHECKPOINTS) if (self.path / name).exists()]
        if held and not self._overwrite:
            if not self._resume:
                raise UsageError(
                    f"run folder {self.path} already holds a run ({', '.join(held)}); pass another folder, or go on with it: "
                    "--resume, or overwrite it: overwrite=True, on the command line --overwrite"
                )
            if self.checkpoints.latest() is None and self._has_trained_weights():
                raise UsageError(
                    f"run folder {self.path} holds trained weights and no checkpoint to go on from; pass another folder, or "
                    "--overwrite to lose them"
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
        self._open(None)

    def go_on(self, job: Job, plan: Plan, steps_done: int) -> None:
        """Take up the run that the folder holds after `steps_done` steps; what it recorded of later ones will come again."""
        metrics = self.path / METRICS
        try:
            kept = _lines_up_to(metrics, steps_done)
            _replace_text(metrics, "".join(line + "\n" for line in kept))
            _replace_text(self.path / PLAN, plan.to_toml())
            _replace_text(self.path / JOB, tomli_w.dumps(_toml(job.describe())))
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        records = [json.loads(line) for line in kept]
        self._evaluated = {record["step"] for record in records if record.get("kind") == EvaluationReport.kind}
        self._open(steps_done + 1)

    def _open(self, first_step: int | None) -> None:
        self._loggers = [JsonLines(self.path / METRICS)]
        if importlib.util.find_spec("tensorboard") is not None:
            self._loggers.append(TensorBoard(self.path / EVENTS, first_step=first_step))

    def _write_start(self, job: Job, plan: Plan, model: nn.Module) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear()
            (self.path / PLAN).write_text(plan.to_toml())
            (self.path / JOB).write_text(tomli_w.dumps(_toml(job.describe())))
            _save(model, 0, self.path / WEIGHTS)
            # The trained weights are written beside the initial ones before they replace them.
            free, needed = shutil.disk_usage(self.path).free, (self.path / WEIGHTS).stat().st_size
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if free < needed:
            raise self._unwritable(f"{free:,} bytes are free, the trained weights need {needed:,}")

    def __call__(self, report: Report) -> None:
        if isinstance(report, EvaluationReport):
            # A run that goes on, or ends on a step that was evaluated, evaluates once more what is recorded already.
            if report.step in self._evaluated:
                return
            self._evaluated.add(report.step)
        for logger in self._loggers:
            logger(report)

    def finish(self, model: nn.Module, steps_done: int) -> None:
        """Write the trained weights.

        Raises:
            PacelineError: they could not be written there; the message says where they are instead.
        """
        try:
            _save(model, steps_done, self.path / WEIGHTS)
        except UsageError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            raise self.rescue(model, steps_done, error.__cause__) from error

    def rescue(self, model: nn.Module, steps_done: int, error: OSError) -> PacelineError:
        """Write the weights to a temporary folder, since `error` came of writing them here, and return what to tell the user."""
        why = error.strerror or str(error)
        try:
            rescued = Path(tempfile.mkdtemp(prefix="paceline-weights-")) / WEIGHTS
            _save(model, steps_done, rescued)
        except (OSError, UsageError) as second:
            with contextlib.suppress(OSError, UnboundLocalError):
                rescued.parent.rmdir()
            return PacelineError(
                f"cannot write the trained weights to {self.path} ({why}), nor to {tempfile.gettempdir()} ({second}); "
                "free some space and train again"
            )
        return PacelineError(
            f"cannot write the trained weights to {self.path} ({why}); they are in {rescued}: move them to where there is space"
        )

    def close(self) -> None:
        """Close the files of the metrics."""
        for logger in self._loggers:
            logger.close()
        self._loggers = []

    def contents(self) -> list[tuple[str, int]]:
        """Return names and sizes in bytes of what the folder holds, each folder in it as one."""
        entries = []
        for entry in sorted(self.path.iterdir()):
            if entry.is_dir():
                entries.append((f"{entry.name}/", sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())))
            else:
                entries.append((entry.name, entry.stat().st_size))
        return entries

    def _clear(self) -> None:
        # Checkpoints first: whoever is killed in between and resumes must not go on with what was to be overwritten.
        if (self.path / CHECKPOINTS).is_dir():
            gone = Path(tempfile.mkdtemp(dir=self.path, prefix=f".{CHECKPOINTS}."))
            os.replace(self.path / CHECKPOINTS, gone)
            shutil.rmtree(gone, ignore_errors=True)
        for name in (PLAN, JOB, METRICS, WEIGHTS):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / EVENTS, ignore_errors=True)

    def _has_trained_weights(self) -> bool:
        """Return whether the weights are more than the initial ones, so that somebody would miss them; in doubt, yes."""
        if not (self.path / WEIGHTS).exists():
            return False
        try:
            with safe_open(self.path / WEIGHTS, framework="pt") as file:
                return (file.metadata() or {}).get(STEPS_DONE) != "0"
        except (OSError, SafetensorError):
            return True

    def _unwritable(self, why: str) -> UsageError:
        return UsageError(f"cannot write run folder {self.path} ({why}); pass a folder that you can write, on a disk with space")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _save(model: nn.Module, steps_done: int, path: Path) -> None:
    export_weights(State(weights=model.state_dict(), progress={"steps_done": steps_done}), path)


def _lines_up_to(metrics: Path, steps_done: int) -> list[str]:
    """Return the lines of steps up to `steps_done`; without a last line that was cut short."""
    kept = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= steps_done:
            kept.append(line)
    return kept


def _replace_text(path: Path, text: str) -> None:
    """Write a file so that it is at all times the old one or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _toml(value: Any) -> Any:
    """Return a value as TOML can hold it: without None, anything foreign as text."""
    if isinstance(value, dict):
        return {str(name): _toml(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_toml(inner) for inner in value if inner is not None]
    return value if isinstance(value, bool | int | float | str) else str(value)
