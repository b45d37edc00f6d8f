"""DistributedDataParallel in an ordinary loop, over real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.distributed import DistributedDataParallel
from tests.parallel import gradient_checks, state_checks
from tests.parallel.modules import assert_same, batchnorm, gradients, twins, x_of
from tests.parallel.ranks import run_checks
from tests.processes import Workers

CHECKS = {check.__name__: check for check in (*gradient_checks.CHECKS, *state_checks.CHECKS)}
OF_THREE = ("join_uneven", "unused_parameters", "same_gradients", "counts", "leave_early")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wrong(results: list[Any]) -> dict[str, str]:
    """Return what went wrong by check, of all ranks."""
    wrong: dict[str, str] = {}
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            raise result
        for name, text in result.items():
            wrong[name] = wrong.get(name, "") + f"\nrank {rank}: {text}"
    return wrong


@pytest.fixture(scope="module")
def of_two(workers: Workers) -> dict[str, str]:
    return _wrong(workers.run(2, run_checks, free_port(), list(CHECKS.values()), timeout_s=100))


@pytest.fixture(scope="module")
def of_three(workers: Workers) -> dict[str, str]:
    return _wrong(workers.run(3, run_checks, free_port(), [CHECKS[name] for name in OF_THREE], timeout_s=100))


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(of_two: dict[str, str], check: str) -> None:
    assert check not in of_two, of_two[check]


@pytest.mark.parametrize("check", OF_THREE)
def test_three_ranks(of_three: dict[str, str], check: str) -> None:
    assert check not in of_three, of_three[check]


def test_alone_it_is_the_module() -> None:
    """A script that nobody launched runs unchanged."""
    module, reference = twins(batchnorm)
    model = DistributedDataParallel(module)
    assert model.is_main
    for one in (model, reference):
        one(x_of(4)).square().mean().backward()
    assert_same(gradients(module), gradients(reference), 0.0)
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()))
    with model.join(), model.no_sync():
        model(x_of(3)).sum().backward()
    model.backward(model(x_of(3)).mean(), count=3)
    model.close()
    with pytest.raises(UsageError, match="copy, or closed"):
        model(x_of(3))
    with pytest.raises(UsageError, match="nothing to train"):
        DistributedDataParallel(nn.ReLU())


LOOP = """
import os, sys, torch
from torch import nn
from paceline.parallel.distributed import DistributedDataParallel

torch.manual_seed(0)
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
if "wrap" in sys.argv:
    model = DistributedDataParallel(model, timeout_s=30)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
for step, batch in enumerate(data):
    if "fail" in sys.argv and rank == 1 and step == 3:
        raise LookupError("a bad record")
    optimizer.zero_grad()
    model(batch[rank::size]).square().mean().backward()
    optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
"""


def launch(script: Path, saved: Path, *words: str, size: int) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={size}", "--master-port", str(free_port())] if size > 1 else []
    command = [sys.executable, *launcher, str(script), str(saved), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def test_the_same_loop_under_torchrun(tmp_path: Path) -> None:
    """The loop as a script: two processes with the wrapper end with the weights of one without, under the same names."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    for saved, words, size in (("one.pt", (), 1), ("two.pt", ("wrap",), 2)):
        done = launch(script, tmp_path / saved, *words, size=size)
        assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "two.pt"), torch.load(tmp_path / "one.pt"))


def test_an_exception_that_ends_a_rank_is_what_the_others_report(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    done = launch(script, tmp_path / "none.pt", "wrap", "fail", size=2)
    assert done.returncode != 0
    assert "PeerError" in done.stderr
    assert "rank 1, the program: LookupError: a bad record" in done.stderr
