"""Saving and resuming in worker processes, where only one of them may be believed about the files."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from paceline import Trainer
from paceline.checkpoint import CheckpointError
from paceline.errors import PeerError
from tests.processes import Workers
from tests.resume.runs import STEPS, Ran, assert_same, copied, job, plan, take, uninterrupted


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def go_on(rank: int, size: int, port: int, folder: str, stop: int) -> Ran:
    """Resume from a relative path, which holds nothing where rank 1 is, and save."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    where = Path(folder) / f"seen by rank {rank}"
    where.mkdir(exist_ok=True)
    os.chdir(where)
    with Trainer(job(), plan(size), timeout_s=20) as trainer:
        trainer.resume("checkpoints")
        losses = take(trainer, stop)
        trainer.save("checkpoints")
        return Ran(losses, copied(trainer.model))


def test_ranks_that_see_other_files_go_on_alike_and_hear_of_damage(tmp_path: Path) -> None:
    """What the main process sees counts for all: nobody branches otherwise, nobody waits. Kinds C1, C2, H1, H11."""
    expected = uninterrupted(job())
    with Workers() as workers:

        def run(stop: int) -> list[Any]:
            return workers.run(2, go_on, free_port(), str(tmp_path), stop)

        halves = [run(5), run(STEPS)]
        for rank in (0, 1):
            assert halves[0][rank].losses + halves[1][rank].losses == expected.losses
            assert_same(halves[1][rank].state, expected.state)
        assert not any((tmp_path / "seen by rank 1").iterdir())

        for path in (tmp_path / "seen by rank 0" / "checkpoints").iterdir():
            os.truncate(path / "optimizer.safetensors", 100)
        main, other = run(STEPS)
    assert isinstance(main, CheckpointError)
    assert "optimizer.safetensors is truncated" in str(main)
    assert "no other checkpoint beside it is whole" in str(main)
    assert isinstance(other, PeerError)
    assert other.failure.error == "CheckpointError"
