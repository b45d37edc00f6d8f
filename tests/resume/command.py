"""The command, run as a user would, in a session of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.resume.runs import FILE

# A worker of the command holds no variables of a run that pytest itself may be part of.
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_")


def start(*arguments: str, job: str = "slow", cwd: Path) -> subprocess.Popen[str]:
    """Start `paceline train` of a job of runs.py."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | {"PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", f"{FILE}:{job}", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment, start_new_session=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Wait until something is so, while the process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()}"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint of a run; 0 without one."""
    return max((int(path.name[5:13]) for path in (run / "checkpoints").glob("step-*")), default=0)


def kill_everything(process: subprocess.Popen[str]) -> None:
    """End a run as a lost machine does: its workers die with their launcher."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def step_losses(run: Path) -> list[tuple[int, float]]:
    """Return step and loss of every line that a run has recorded of a step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]
