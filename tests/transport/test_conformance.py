"""Every transport keeps every promise of the seam."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from paceline.transport.base import Transport
from paceline.transport.conformance import CHECKS, Run
from paceline.transport.threads import ThreadsTransport
from paceline.transport.torch_distributed import TorchDistributedTransport

Body = Callable[[Transport], Any]


def in_threads(size: int, body: Body, timeout_s: float = 30.0) -> list[Any]:
    results: list[Any] = [None] * size

    def work(transport: ThreadsTransport) -> None:
        try:
            results[transport.rank] = body(transport)
        except BaseException as error:
            results[transport.rank] = error
        finally:
            transport.close()

    ends = ThreadsTransport.group(size, timeout_s)
    threads = [threading.Thread(target=work, args=(end,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a rank hangs"
    return results


def with_transport(rank: int, size: int, path: str, body: Body, timeout_s: float) -> Any:
    before = threading.active_count()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    transport = TorchDistributedTransport(timeout_s)
    try:
        return body(transport)
    finally:
        transport.close()
        dist.destroy_process_group()
        assert threading.active_count() == before, threading.enumerate()


@pytest.fixture(params=["threads", "torch_distributed"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    if request.param == "threads":
        return in_threads
    workers = request.getfixturevalue("workers")
    runs: list[str] = []

    def in_processes(size: int, body: Body, timeout_s: float = 30.0) -> list[Any]:
        runs.append(str(tmp_path / f"store{len(runs)}"))
        return workers.run(size, partial(with_transport, path=runs[-1], body=body, timeout_s=timeout_s))

    return in_processes


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_promise_is_kept(run: Run, check: Callable[[Run], None]) -> None:
    check(run)
