"""A run folder holds a whole run, is found unwritable before training, and never costs anybody the weights."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import Checkpoints, State, load_weights
from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.plan import Plan
from paceline.report import run_folder
from paceline.report.reports import EvaluationReport, StepReport
from paceline.report.run_folder import RunFolder


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def job(model: nn.Module) -> Job:
    return Job(
        model=model, loss=lambda m, b: b.sum(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1), batch_size=2, data=[0, 1]
    )


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_folder_holds_the_run(tmp_path: Path, job: Job, model: nn.Module) -> None:
    path = tmp_path / "runs" / "first"
    with RunFolder(path) as folder:
        assert not path.exists()
        folder.start(job, Plan(replicas=2, micro_batches=2), model)
        folder(StepReport(step=1, epoch=0, losses={"loss": 1.0}, lrs={"loss": 0.1}, rows=2, count=2, seconds=0.1))
        with torch.no_grad():
            model.get_parameter("embed.weight").fill_(7)
        folder.finish(model, 1)
    assert {"plan.toml", "job.toml", "metrics.jsonl", "model.safetensors"} <= {name for name, _ in folder.contents()}
    assert Plan.from_toml((path / "plan.toml").read_text()) == Plan(replicas=2, micro_batches=2)
    assert tomllib.loads((path / "job.toml").read_text())["batch_size"] == 2
    assert json.loads((path / "metrics.jsonl").read_text())["loss"] == 1.0
    assert float(load_weights(path / "model.safetensors")["head.weight"].mean()) == 7


@pytest.mark.filterwarnings("ignore")
def test_folder_of_another_run_is_kept_unless_told(tmp_path: Path, job: Job, model: nn.Module) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path) as folder:
        folder.start(job, Plan(), model)
    with pytest.raises(
        UsageError,
        match=r"already holds a run \(plan.toml, .*\); pass another folder, or go on with it: --resume, or .*--overwrite",
    ):
        RunFolder(tmp_path)
    with RunFolder(tmp_path, overwrite=True) as folder:
        folder.start(job, Plan(), model)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file; pass another folder"):
        RunFolder(tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot write run folder .*is a file"):
        RunFolder(tmp_path / "file" / "run")


def test_too_small_disk_is_found_at_the_start_and_nothing_stays(
    tmp_path: Path, job: Job, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 95, 5))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"cannot write run folder .* \(5 bytes are free, the trained weights need \d+\)"):
        RunFolder(tmp_path / "run").start(job, Plan(), model)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")
def test_trained_weights_survive_a_disk_that_filled_up(
    tmp_path: Path, job: Job, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with RunFolder(tmp_path / "run") as folder:
        folder.start(job, Plan(), model)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(PacelineError, match=r"cannot write the trained weights to .*; they are in ") as caught:
            folder.finish(model, 1)
    rescued = Path(str(caught.value).split("they are in ")[1].split(":")[0])
    assert torch.equal(load_weights(rescued)["embed.weight"], model.get_parameter("embed.weight"))


def report_of(step: int) -> StepReport:
    return StepReport(step=step, epoch=0, losses={"loss": float(step)}, lrs={"loss": 0.1}, rows=2, count=2, seconds=0.1)


def evaluation_of(step: int) -> EvaluationReport:
    return EvaluationReport(step=step, loss=1.0, metrics={}, rows=2, seconds=0.1)


def recorded(path: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())]


@pytest.mark.filterwarnings("ignore")
def test_run_that_goes_on_keeps_what_comes_before_its_checkpoint_and_records_the_rest_once(
    tmp_path: Path, job: Job, model: nn.Module
) -> None:
    """The process was killed in the middle of writing a line, two steps after it had saved."""
    with RunFolder(tmp_path / "run") as folder:
        folder.start(job, Plan(), model)
        for report in (evaluation_of(0), report_of(1), report_of(2), evaluation_of(2)):
            folder(report)
        folder.checkpoints.save(State(weights=model.state_dict(), progress={"steps_done": 2}))
        for report in (report_of(3), evaluation_of(3)):
            folder(report)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path / "run")
    with RunFolder(tmp_path / "run", resume=True) as folder:
        folder.go_on(job, Plan(replicas=2, micro_batches=2), steps_done=2)
        for report in (evaluation_of(2), report_of(3), evaluation_of(3), evaluation_of(3)):
            folder(report)
    kinds = [("evaluation", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("evaluation", 3)]
    assert recorded(tmp_path / "run") == kinds
    assert Plan.from_toml((tmp_path / "run" / "plan.toml").read_text()).replicas == 2
    assert not [entry for entry in (tmp_path / "run").iterdir() if entry.name.startswith(".")]


@pytest.mark.filterwarnings("ignore")
def test_tensor_board_of_a_run_that_goes_on_forgets_later_steps(tmp_path: Path, job: Job, model: nn.Module) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path) as folder:
        folder.start(job, Plan(), model)
        folder(report_of(1))
        folder(report_of(7))
    with RunFolder(tmp_path, resume=True) as folder:
        folder.go_on(job, Plan(), steps_done=1)
        folder(report_of(2))
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == [1, 2]


@pytest.mark.filterwarnings("ignore")
def test_only_a_run_that_came_to_nothing_is_started_again(tmp_path: Path, job: Job, model: nn.Module) -> None:
    """Resuming where there is no checkpoint starts anew, but not over trained weights that somebody would miss."""
    with RunFolder(tmp_path) as folder:
        folder.start(job, Plan(), model)
        folder(report_of(1))
    with RunFolder(tmp_path, resume=True) as folder:
        folder.start(job, Plan(), model)
        folder.finish(model, 1)
    with pytest.raises(UsageError, match="holds trained weights and no checkpoint to go on from; pass another folder, or --over"):
        RunFolder(tmp_path, resume=True)


@pytest.mark.filterwarnings("ignore")
def test_overwriting_takes_the_checkpoints_along(tmp_path: Path, job: Job, model: nn.Module) -> None:
    Checkpoints(tmp_path / "checkpoints").save(State(weights=model.state_dict(), progress={"steps_done": 2}))
    with pytest.raises(UsageError, match=r"already holds a run \(checkpoints\)"):
        RunFolder(tmp_path)
    with RunFolder(tmp_path, overwrite=True) as folder:
        folder.start(job, Plan(), model)
    assert not (tmp_path / "checkpoints").exists()
