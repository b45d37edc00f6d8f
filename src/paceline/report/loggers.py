"""Loggers that come with Paceline. A logger is any function of a report; none of these stops a run that it cannot record."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.errors import UsageError
from paceline.report.reports import Report

LOG = logging.getLogger("paceline")


class JsonLines:
    """Writes each report as one line of JSON, at once, so that a run that is killed leaves all its lines.

    NaN and infinities, which JSON lacks, are written as the strings "nan", "inf" and "-inf". Where writing fails (a full
    disk), it warns once and leaves the rest out.

    Args:
        path: the file to append to; its folder must exist.

    Raises:
        UsageError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write {self.path} ({error.strerror}); pass a path in a folder that you can write") from error
        self._is_open, self._failed = True, False

    def __call__(self, report: Report) -> None:
        if self._failed or not self._is_open:
            return
        line = json.dumps({name: _json(value) for name, value in report.as_dict().items()}, allow_nan=False, default=str)
        try:
            left = (line + "\n").encode()
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._failed = True
            LOG.warning("cannot write %s (%s); training goes on, further metrics are not recorded", self.path, error.strerror)

    def close(self) -> None:
        """Close the file; reports that come later are left out."""
        if self._is_open:
            self._is_open = False
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TensorBoard:
    """Writes the numbers of each report as TensorBoard events: `step/loss`, `evaluation/accuracy`, ...

    Args:
        folder: where the event files go; made where it is missing.
        first_step: the step that is recorded first where a run goes on: what the folder has of it and of later ones is void.

    Raises:
        UsageError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int | None = None) -> None:
        # An optional dependency, and one that takes seconds to import.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"TensorBoard events need the package tensorboard ({error}); pip install 'paceline[tensorboard]'"
            ) from error
        self.folder = Path(folder)
        self._failed = False
        try:
            self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=first_step)
        except OSError as error:
            raise UsageError(f"cannot write {self.folder} ({error.strerror}); pass a folder that you can write") from error

    def __call__(self, report: Report) -> None:
        self._guard(lambda: self._write(report))

    def close(self) -> None:
        """Write what is pending and close the file."""
        self._guard(self._writer.close)

    def _write(self, report: Report) -> None:
        for name, value in report.as_dict().items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{report.kind}/{name}", value, global_step=report.step)

    def _guard(self, write: Any) -> None:
        """Run `write`; where the disk is full, warn once and go on without."""
        if self._failed:
            return
        try:
            write()
        except OSError as error:
            self._failed = True
            LOG.warning("cannot write TensorBoard events to %s (%s); training goes on without them", self.folder, error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _json(value: Any) -> Any:
    """Return a value that strict JSON can hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return value
