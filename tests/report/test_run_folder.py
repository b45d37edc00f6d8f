"""A run folder holds a whole run, is found unwritable before training, and never costs anybody the weights."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.plan import Plan
from paceline.report import run_folder
from paceline.report.reports import StepReport
from paceline.report.run_folder import RunFolder
from paceline.report.weights import load_weights, save_weights


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


def test_weights_come_back_under_all_names(tmp_path: Path, model: nn.Module) -> None:
    save_weights(model, tmp_path / "w.safetensors")
    state = load_weights(tmp_path / "w.safetensors")
    other = Tied()
    other.load_state_dict(state)
    assert sorted(state) == sorted(model.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert state["head.weight"] is state["embed.weight"]


def test_weights_that_are_views_of_one_buffer_are_stored(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    model = nn.Linear(2, 3)
    model.weight.data, model.bias.data = flat[:6].view(3, 2), flat[5:8]  # overlapping, even
    save_weights(model, tmp_path / "w.safetensors")
    state = load_weights(tmp_path / "w.safetensors")
    assert state["weight"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert state["bias"].tolist() == [5, 6, 7]


def test_weights_that_cannot_be_written_leave_the_old_file(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(model, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_weights(Tied(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.safetensors"]


def test_weights_that_are_not_there_or_broken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read weights from"):
        load_weights(tmp_path / "none.safetensors")
    (tmp_path / "half.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(UsageError, match="cannot read weights from"):
        load_weights(tmp_path / "half.safetensors")


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_folder_holds_the_run(tmp_path: Path, job: Job, model: nn.Module) -> None:
    path = tmp_path / "runs" / "first"
    with RunFolder(path) as folder:
        assert not path.exists()
        folder.start(job, Plan(replicas=2, micro_batches=2), model)
        folder(StepReport(step=1, epoch=0, losses={"loss": 1.0}, lrs={"loss": 0.1}, rows=2, count=2, seconds=0.1))
        with torch.no_grad():
            model.get_parameter("embed.weight").fill_(7)
        folder.finish(model)
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
    with pytest.raises(UsageError, match=r"already holds a run \(plan.toml, .*\); pass another folder, or .*--overwrite"):
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
            folder.finish(model)
    rescued = Path(str(caught.value).split("they are in ")[1].split(":")[0])
    assert torch.equal(load_weights(rescued)["embed.weight"], model.get_parameter("embed.weight"))
