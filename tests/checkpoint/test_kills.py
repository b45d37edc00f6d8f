"""Kill -9 at random moments: what was saved is there and whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# One process imports torch once and forks a saver for each round, which it kills without warning.
ROUNDS = """
import json, os, random, signal, sys, time
import torch
from paceline.checkpoint import Checkpoints, State

torch.set_num_threads(1)
folder, rounds = sys.argv[1], int(sys.argv[2])
random.seed(0)
checkpoints = Checkpoints(folder)


def saver(pipe):
    latest = checkpoints.latest()
    step = int(latest.name[5:13]) if latest is not None else 0
    while True:
        step += 1
        weights = {f"w{i}": torch.full((2000,), float(step)) for i in range(8)}
        checkpoints.save(State(weights=weights, progress={"steps_done": step}), keep=2, best=step % 5 == 0, shard_bytes=20000)
        os.write(pipe, f"{step} ".encode())


said, cut_short = 0, 0
for round_ in range(rounds):
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            saver(start)
        finally:
            os._exit(1)
    os.close(start)
    text = os.read(end, 100)
    time.sleep(random.random() * 0.04)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(end, 100):
        text += part
    os.close(end)
    said = int(text.split()[-1])
    cut_short += any(name.endswith((".saving", ".removing")) for name in os.listdir(folder))
    latest = checkpoints.latest()
    assert int(latest.name[5:13]) in (said, said + 1), (latest, said)
    assert checkpoints.best() is not None or said < 6
    for path in checkpoints.list():
        state = checkpoints.load(path)
        assert all(bool((tensor == state.steps_done).all()) for tensor in state.weights.values()), path
    assert len(checkpoints.list()) >= min(2, said)
checkpoints.save(State(weights={}, progress={"steps_done": said + 2}), keep=2)
assert not [name for name in os.listdir(folder) if name.startswith(".")], os.listdir(folder)
print(json.dumps({"said": said, "cut_short": cut_short}))
"""


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """After each of 24 kills the last checkpoint that was said to be saved is there, or the next, and all are whole."""
    done = subprocess.run([sys.executable, "-c", ROUNDS, str(tmp_path), "24"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["said"] >= 24
    assert told["cut_short"] >= 4, "hardly any kill came in the middle of a save, so this shows nothing"
