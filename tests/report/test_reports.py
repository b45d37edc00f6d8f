"""Reports cost nothing until they are read, and loggers record all of them without ever stopping a run."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from paceline.errors import UsageError
from paceline.report.loggers import JsonLines, TensorBoard
from paceline.report.progress import ProgressBar
from paceline.report.reports import EvaluationReport, StepReport


def step_report(step: int = 1, **changes: Any) -> StepReport:
    values: dict[str, Any] = {"losses": {"loss": 2.0}, "lrs": {"loss": 0.1}, "rows": 8, "count": 8, "seconds": 0.5} | changes
    return StepReport(step=step, epoch=0, **values)


def test_step_report_reads_tensors_only_when_asked() -> None:
    """A meta tensor has no value: making the report must not ask for one, reading the loss must."""
    unread = torch.empty((), device="meta")
    report = step_report(losses={"loss": unread}, grad_norm=torch.tensor(3.0), metrics={"share": torch.tensor(0.5)})
    assert (report.grad_norm, report.metrics["share"], report.samples_per_s) == (3.0, 0.5, 16.0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        print(report.loss)


def test_step_report_reads_losses_that_still_have_a_graph() -> None:
    assert step_report(losses={"loss": torch.ones((), requires_grad=True) * 2}).loss == 2.0


def test_step_report_of_several_losses_names_each() -> None:
    report = step_report(losses={"generator": 1.0, "critic": 2.0}, lrs={"generator": 0.1, "critic": 0.2}, metrics={"loss": 7.0})
    flat = report.as_dict()
    assert (report.loss, report.lr) == (3.0, 0.1)
    assert (flat["loss/critic"], flat["lr/critic"], flat["metrics/loss"]) == (2.0, 0.2, 7.0)
    json.dumps(flat)


def test_evaluation_report_is_a_mapping_of_loss_and_metrics() -> None:
    report = EvaluationReport(
        step=5, loss=torch.tensor(0.25), metrics={"accuracy": torch.tensor(0.5), "confusion": torch.eye(2)}, rows=9, seconds=1.0
    )
    assert (report["accuracy"], report["loss"], report.loss, list(report)) == (0.5, 0.25, 0.25, ["loss", "accuracy", "confusion"])
    assert report.as_dict()["confusion"] == [[1.0, 0.0], [0.0, 1.0]]
    with pytest.raises(KeyError):
        report["f1"]


def test_json_lines_writes_each_report_at_once_as_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as log:
        log(step_report(1, losses={"loss": float("nan")}))
        log(EvaluationReport(step=1, loss=1.0, metrics={}, rows=3, seconds=0.1))
        first, second = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert (first["kind"], first["loss"]) == ("step", "nan")
    assert (second["kind"], second["loss"], second["rows"]) == ("evaluation", 1.0, 3)


def test_json_lines_on_a_full_disk_warns_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with JsonLines(full) as log, caplog.at_level(logging.WARNING):
        log(step_report(1))
        log(step_report(2))
    (record,) = caplog.records
    assert re.fullmatch("cannot write /dev/full [(]No space left on device[)]; training goes on, .*", record.getMessage())


def test_json_lines_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*none/m.jsonl \(No such file or directory\); pass a path"):
        JsonLines(tmp_path / "none" / "m.jsonl")


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_tensor_board_holds_all_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path / "events") as log:
        log(step_report(3, losses={"loss": 1.5}))
        log(EvaluationReport(step=3, loss=1.0, metrics={"accuracy": 0.5}, rows=3, seconds=0.1))
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (loss,), (accuracy,) = events.Scalars("step/loss"), events.Scalars("evaluation/accuracy")
    assert (loss.step, loss.value, accuracy.step, accuracy.value) == (3, 1.5, 3, 0.5)


def test_progress_without_a_terminal_is_plain_lines_with_first_and_last_step() -> None:
    out = io.StringIO()
    with ProgressBar(lambda: 50, console=Console(file=out, width=40)) as bar:
        for step in range(1, 51):
            bar(step_report(step))
    first, last = out.getvalue().splitlines()
    assert re.fullmatch(r"step 1/50  loss 2.0000  lr 0.1  16 samples/s", first)
    assert re.fullmatch(r"step 50/50  loss 2.0000  lr 0.1  [\d,]+ samples/s  remaining 0:00", last)


def test_progress_on_a_terminal_is_a_bar_that_shows_the_last_step() -> None:
    out = io.StringIO()
    with ProgressBar(50, console=Console(file=out, width=120, force_terminal=True)) as bar:
        for step in range(1, 31):
            bar(step_report(step))
    assert "step 30/50" in out.getvalue()
    assert "samples/s" in out.getvalue()
