"""Kill -9 at random moments, mid-step and mid-save: whoever resumes comes to the same weights as if nothing had happened."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.checkpoint import Checkpoints, load_weights
from tests.resume.command import kill_everything, newest_step, start, step_losses, wait_for
from tests.resume.runs import REPRODUCIBLE, Ran, assert_same, job, uninterrupted

STEPS = 40


@functools.cache
def reference() -> Ran:
    return uninterrupted(job(steps=STEPS))


@pytest.mark.parametrize(("transport", "replicas"), [("processes", (2, 1, 4)), ("threads", (2, 1, 4, 2))])
def test_run_that_is_killed_again_and_again_ends_as_one_that_was_not(
    tmp_path: Path, transport: str, replicas: tuple[int, ...]
) -> None:
    """Under another number of replicas each time; every step is recorded once. Kinds H1, H2, H4, H5."""
    moments = random.Random(5)
    run = tmp_path / "run"
    options = ("--transport", transport, "--run", "run", "--save-every", "1", "--resume", "auto", "--quiet")
    for number in replicas[:-1]:
        process = start("--plan", f"replicas={number},{REPRODUCIBLE}", *options, cwd=tmp_path)
        before = newest_step(run)
        wait_for(lambda before=before: newest_step(run) >= before + 3, process)  # type: ignore[misc]
        time.sleep(moments.random() * 0.2)
        kill_everything(process)
        assert newest_step(run) < STEPS, "it was done before the kill, which shows nothing"
    process = start("--plan", f"replicas={replicas[-1]},{REPRODUCIBLE}", *options, cwd=tmp_path)
    out, errors = process.communicate(timeout=90)
    assert (process.returncode, out, errors) == (0, "", "")
    assert step_losses(run) == list(enumerate(reference().losses, 1))
    assert_same(load_weights(run / "model.safetensors"), reference().state)
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")], "what was cut short is cleared away"


# One process imports torch once and forks a trainer for each round, which it kills without warning.
ROUNDS = """
import json, os, random, signal, sys, time
import torch
import torch._dynamo  # optimizers import it at their first step, which takes each child a second
from paceline import Trainer
from paceline.checkpoint import Checkpoints
from tests.resume.runs import job, plan

torch.set_num_threads(1)
folder, steps = sys.argv[1], int(sys.argv[2])
moments = random.Random(7)
kills = cut_short = 0
while True:
    replicas = moments.choice([1, 2, 3, 4])
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with Trainer(job(steps=steps), plan(replicas), timeout_s=20) as trainer:
                trainer.resume(folder)
                trainer.fit(loggers=[lambda report: os.write(start, b".")], checkpoints=folder, save_every=1, keep=2)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(start)
    # A life lasts a few steps, however fast the machine is, and every other one ends within a save.
    for _ in range(moments.choice([1, 2, 3])):
        os.read(end, 1)
    within_a_save = kills % 2 and time.monotonic() + 5
    while within_a_save > time.monotonic() and not any(name.endswith(".saving") for name in os.listdir(folder)):
        pass
    if not within_a_save:
        time.sleep(moments.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(end)
    cut_short += any(name.endswith((".saving", ".removing")) for name in os.listdir(folder))
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    kills += 1
print(json.dumps({"kills": kills, "cut_short": cut_short}))
"""


def test_many_kills_in_the_middle_of_steps_and_of_saves(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ROUNDS, str(tmp_path), str(STEPS)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["kills"] >= 5
    assert told["cut_short"] >= 1, "no kill came in the middle of a save, so this shows nothing"
    newest = Checkpoints(tmp_path).latest()
    assert newest is not None
    assert_same(load_weights(newest), reference().state)
