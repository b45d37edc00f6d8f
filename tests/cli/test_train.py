"""`paceline train` from end to end, as a user types it: in processes and threads, going well and going wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.checkpoint import load_weights
from paceline.jobs import digits

# A worker of the CLI holds no variables of a run that pytest itself may be part of.
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_")

JOB = """
import os, time
import torch
from torch import nn
from paceline.job import Job

def make(loss):
    x = torch.arange(64.0)[:, None].repeat(1, 4) / 64
    data = torch.utils.data.TensorDataset(x, torch.arange(64))
    return Job(model=lambda: nn.Linear(4, 1), loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.01), data=data,
               batch_size=8, shuffle=False, epochs=50)

def loss(model, batch):
    if (batch[1] == 21).any():  # row 5 of step 3: of two workers the second one's
        raise RuntimeError("boom at row 21")
    return model(batch[0]).square().mean()

def raising():
    return make(loss)

def killed_loss(model, batch):
    if (batch[1] == 21).any():
        os.kill(os.getpid(), 9)
    return model(batch[0]).square().mean()

def killed():
    return make(killed_loss)

def slow_loss(model, batch):
    time.sleep(0.05)
    return model(batch[0]).square().mean()

def slow():
    return make(slow_loss)
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *arguments]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | {"PYTHONUNBUFFERED": "1"}


def paceline(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=100, cwd=cwd, env=environment())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(JOB)
    return tmp_path


def workers_with(mark: str) -> list[int]:
    """Return the processes whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:  # it ended just now
                continue
            if mark.encode() in words and b"paceline" in words:
                found.append(int(entry.name))
    return found


def wait_until_gone(mark: str, seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := workers_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@contextmanager
def running(folder: Path, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A training in two processes that has taken its first step."""
    arguments = command("train", "jobs.py:slow", "--plan", "replicas=2", "--seed", mark)
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment(), start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        assert len(workers_with(mark)) == 3
        yield process
    finally:
        process.kill()
        process.communicate()


def last_loss(text: str) -> str:
    (line,) = re.findall(r"step 5/5  loss (\S+)", text)
    return line


@pytest.mark.timeout(200)
def test_digits_train_alike_on_both_transports_and_leave_a_whole_run_folder(folder: Path) -> None:
    train = ("train", "digits", "--steps", "5", "--plan", "replicas=2")
    by_threads = paceline(*train, "--transport", "threads", cwd=folder)
    by_processes = paceline(*train, "--run", "run", "--trace", "t.json", cwd=folder)
    assert by_threads.returncode == by_processes.returncode == 0, by_threads.stderr + by_processes.stderr
    assert by_threads.stderr == by_processes.stderr == ""
    for done in (by_threads, by_processes):
        assert "2 workers" in done.stdout
        assert re.search(r"held-out loss \S+, accuracy \S+ \(before training, 359 samples\)", done.stdout)
        assert re.search(r"held-out loss \S+, accuracy \S+ \(after training, 359 samples\)", done.stdout)
        assert done.stdout.count("plan ") == 1, "only one worker speaks"
    assert last_loss(by_threads.stdout) == last_loss(by_processes.stdout)

    run = folder / "run"
    assert "replicas = 2" in (run / "plan.toml").read_text()
    assert 'name = "digits"' in (run / "job.toml").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("evaluation", 0), *(("step", step) for step in range(1, 6)), ("evaluation", 5)
    ]  # fmt: skip
    digits.ConvNet().load_state_dict(load_weights(run / "model.safetensors"))
    assert json.loads((folder / "t.json").read_text())["traceEvents"]
    assert sorted(entry.name for entry in folder.iterdir()) == ["jobs.py", "run", "t.json"]

    again = paceline("train", "digits", "--steps", "5", "--run", "run", cwd=folder)
    assert (again.returncode, again.stdout) == (2, "")
    assert re.fullmatch(r"error: run folder run already holds a run .*--resume, .*--overwrite\n", again.stderr)


@pytest.mark.parametrize("transport", ["processes", "threads"])
def test_first_exception_is_told_with_rank_and_step_and_everything_ends(folder: Path, transport: str) -> None:
    mark = f"4{os.getpid()}1"
    started = time.monotonic()
    done = paceline("train", "jobs.py:raising", "--plan", "replicas=2", "--seed", mark, "--transport", transport, cwd=folder)
    assert done.returncode == 1
    *trace, last = done.stderr.splitlines()
    assert last == "error: rank 1, step 3, micro-batch 1, forward: RuntimeError: boom at row 21"
    assert trace[0] == "Traceback (most recent call last):"
    assert "jobs.py" in trace[1]
    assert done.stderr.count("RuntimeError: boom at row 21") == 2, "once in its traceback and once in the last line"
    assert time.monotonic() - started < 60
    assert wait_until_gone(mark, 1) == []


def test_worker_that_is_killed_is_told_by_rank(folder: Path) -> None:
    done = paceline("train", "jobs.py:killed", "--plan", "replicas=2", cwd=folder)
    assert done.returncode == 1
    assert re.search(r"^error: rank 1 was ended by SIGKILL; the system ends processes so when memory runs out", done.stderr, re.M)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_workers_end_with_their_launcher(folder: Path, number: signal.Signals, status: int) -> None:
    mark = f"5{os.getpid()}{int(number)}"
    with running(folder, mark) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == status
        assert wait_until_gone(mark, 5) == []
    if number != signal.SIGKILL:
        assert re.fullmatch(r"stopped after step \d+; nothing was saved: train with --run DIR to be able to go on\n", errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp"], "there is no job 'gtp'; a job is gpt, digits, or path.py:function; did you mean gpt[?]"),
        (["digits", "--plan", "replcas=2"], "a plan has no 'replcas'; .* did you mean replicas[?]"),
        (["digits", "--plan", "replicas=100"], "replicas=100 needs at least 100 rows in a batch, got batch_size=64; .*"),
        (["digits", "--plan", "replicas=2", "--workers", "3"], "replicas=2 x stages=1 needs 2 workers, got 3; .*"),
        (["digits", "--plan", "replicas=2", "--plan-file", "p.toml"], "--plan replicas=2 and --plan-file p.toml are both .*"),
        (["digits", "--plan-file", "none.toml"], "cannot read plan file none.toml .*"),
        (["digits", "--transport", "carrier"], "--transport carrier is not one of processes, threads; .*"),
        (["digits", "--steps", "0"], "steps=0 is not a whole number of at least 1"),
        (["digits", "--timeout", "0"], "--timeout 0 is not above 0; pass seconds"),
        (["digits", "--run", "jobs.py"], "run folder jobs.py is a file; pass another folder"),
        (["digits", "--plan", "replicas=2", "--run", "/proc/1/run"], "cannot write run folder /proc/1/run .*"),
        (["digits", "--trace", "none/t.json"], "--trace none/t.json lies in a folder that does not exist; .*"),
        (["digits", "--nope"], "No such option: --nope.*"),
        ([], "Missing argument 'JOB'; see paceline --help"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli import main

    monkeypatch.chdir(folder)
    assert main(["train", *arguments]) == 2
    assert re.fullmatch(f"error: {message}\n", capfd.readouterr().err)


def test_half_set_variables_are_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["train", "digits"]) == 2
    assert capfd.readouterr().err == "error: RANK=0 is set without WORLD_SIZE; set both (torchrun does), or neither to run alone\n"
