"""SIGTERM and Ctrl-C finish the step and save it; a second one leaves at once. In threads and in worker processes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from paceline.checkpoint import load_weights
from tests.resume.command import newest_step, start, step_losses, wait_for
from tests.resume.runs import REPRODUCIBLE, assert_same, job, uninterrupted

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
BOTH = pytest.mark.parametrize("transport", ["processes", "threads"])


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_says_how_to_go_on(tmp_path: Path, transport: str, number: signal.Signals) -> None:
    run = tmp_path / "run"
    options = ("--plan", f"replicas=2,{REPRODUCIBLE}", "--transport", transport, "--run", "run")
    process = start(*options, "--save-every", "3", cwd=tmp_path)
    wait_for(lambda: newest_step(run) >= 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == STATUS[number]
    told = re.fullmatch(
        r"stopped after step (\d+), saved in (run/checkpoints/step-\d+); go on with: paceline train \S+:slow .* --resume\n", errors
    )
    assert told, errors
    step = int(told[1])
    assert newest_step(run) == step == len(step_losses(run)) < 40
    assert load_weights(tmp_path / told[2])
    if number is signal.SIGTERM and transport == "threads":
        process = start(*options, "--resume", "--quiet", cwd=tmp_path)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out, errors) == (0, "", "")
        assert_same(load_weights(run / "model.safetensors"), uninterrupted(job(steps=40)).state)


def test_a_signal_to_the_whole_group_leaves_the_loader_processes_to_finish_the_step(tmp_path: Path) -> None:
    """Schedulers and launchers signal whole process groups, and the step that is asked for needs its data."""
    process = start("--transport", "threads", "--run", "run", "--save-every", "3", job="loading", cwd=tmp_path)
    wait_for(lambda: newest_step(tmp_path / "run") >= 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == STATUS[signal.SIGTERM], errors
    assert errors.startswith("stopped after step"), errors


@BOTH
def test_a_second_signal_leaves_at_once(tmp_path: Path, transport: str) -> None:
    """In the middle of a step of some seconds, which is lost."""
    process = start("--plan", "replicas=2", "--transport", transport, "--run", "run", job="dull", cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("arithmetic"):
            break
    wait_for(lambda: (tmp_path / "run" / "model.safetensors").exists(), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - sent < 8
    assert re.fullmatch("error: (stopped by SIGINT; all workers have ended|interrupted in step 1, without saving it)\n", errors)
    assert newest_step(tmp_path / "run") == 0
