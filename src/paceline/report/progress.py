"""Progress for people: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.report.reports import Report, StepReport

BAR_EVERY_S = 0.1
LINE_EVERY_S = 5.0


class ProgressBar:
    """A logger that shows step, loss, samples per second and remaining time; a context that puts the terminal back.

    The loss is read a few times per second only, because reading it waits for the device.

    Args:
        total_steps: steps of the whole run, or a function that tells once training has begun; None where that is unknown.
        console: where to show it; None means standard output.
    """

    def __init__(self, total_steps: int | Callable[[], int | None] | None = None, *, console: Console | None = None) -> None:
        self._total_steps = total_steps
        self._console = Console() if console is None else console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._started_s = self._shown_s = time.monotonic()
        self._rows = self._rows_shown = self._steps = 0
        self._speed = 0.0
        self._pending: StepReport | None = None

    def __call__(self, report: Report) -> None:
        if not isinstance(report, StepReport):
            self._print_evaluation(report)
            return
        self._rows += report.rows
        self._steps += 1
        self._pending = report
        every_s = BAR_EVERY_S if self._console.is_terminal else LINE_EVERY_S
        if self._steps == 1 or report.step == self._total or time.monotonic() - self._shown_s >= every_s:
            self._show(report)

    @property
    def _total(self) -> int | None:
        return self._total_steps() if callable(self._total_steps) else self._total_steps

    def close(self) -> None:
        """Show the last step and leave the terminal as it was."""
        if self._pending is not None:
            self._show(self._pending)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, report: StepReport) -> None:
        now = time.monotonic()
        # The first report comes after a step that started before this logger could look at the clock.
        seconds = report.seconds if self._steps == 1 else now - self._shown_s
        latest = (self._rows - self._rows_shown) / seconds if seconds > 0 else 0.0
        # A bar that is drawn ten times per second is only readable when its number changes slowly.
        speed = self._speed = 0.9 * self._speed + 0.1 * latest if self._console.is_terminal and self._speed else latest
        self._shown_s, self._rows_shown, self._pending = now, self._rows, None
        if self._console.is_terminal:
            self._show_bar(report, speed)
        else:
            self._print_line(report, speed, now)

    def _show_bar(self, report: StepReport, speed: float) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}" + (f"/{self._total}" if self._total else "")),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]:.4f}"),
                TextColumn("{task.fields[speed]:,.0f} samples/s"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("train", total=self._total, loss=report.loss, speed=speed)
        self._bar.update(self._task, completed=report.step, loss=report.loss, speed=speed)

    def _print_line(self, report: StepReport, speed: float, now: float) -> None:
        total = f"/{self._total}" if self._total else ""
        line = f"step {report.step}{total}  loss {report.loss:.4f}  lr {report.lr:.3g}  {speed:,.0f} samples/s"
        if self._total and self._steps > 1:
            left_s = (now - self._started_s) / self._steps * (self._total - report.step)
            line += f"  remaining {int(left_s) // 60}:{int(left_s) % 60:02d}"
        self._print(line)

    def _print_evaluation(self, report: Report) -> None:
        self._print(f"step {report.step}  {describe_evaluation(report)}")

    def _print(self, line: str) -> None:
        # A line of a log is one line: no wrapping, no colours for numbers, and at once even into a pipe.
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        self._console.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def describe_evaluation(report: Report) -> str:
    """Return loss and scalar metrics of an evaluation in one line: `held-out loss 1.9312, accuracy 0.9889`."""
    values = {"loss": report.loss, **{name: report.metrics[name] for name in report.metrics}}
    shown = []
    for name, value in values.items():
        try:
            shown.append(f"{name} {float(value):.4f}")  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return "held-out " + ", ".join(shown)
