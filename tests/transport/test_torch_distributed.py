"""What only processes can do to each other: be killed, meet by way of variables, or alone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import DeadlineError, Failure, PeerError, UsageError
from paceline.transport.torch_distributed import TorchDistributedTransport
from tests.processes import ProcessDied, Workers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def by_variables(rank: int, size: int, port: int, timeout_s: float = 30.0) -> TorchDistributedTransport:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    return TorchDistributedTransport(timeout_s)


def be_killed(rank: int, size: int, port: int, victim: int, large: bool) -> Any:
    transport = by_variables(rank, size, port)
    tensor = torch.ones(3_000_000 if large else 4)
    transport.all_reduce_(tensor).wait()
    if rank == victim:
        # Killed in the middle of an operation where it has begun one.
        if large:
            transport.all_reduce_(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerError) as caught:
        transport.all_reduce_(tensor).wait()
    waited = time.monotonic() - began
    transport.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
    return caught.value.failure, waited, names, dist.is_initialized()


@pytest.mark.parametrize(("size", "victim", "large"), [(4, 2, True), (2, 1, False), (3, 0, True)])
def test_a_killed_rank_is_named_by_all_others(workers: Workers, size: int, victim: int, large: bool) -> None:
    results = workers.run(size, be_killed, free_port(), victim, large)
    assert isinstance(results[victim], ProcessDied)
    assert results[victim].signal == signal.SIGKILL
    for result in results[:victim] + results[victim + 1 :]:
        assert not isinstance(result, BaseException), result
        failure, waited, names, initialized = result
        assert (failure.rank, failure.error) == (victim, "WorkerDied")
        assert "killed" in failure.message
        assert ("store" in failure.message) == (victim == 0)
        assert waited < 8.0
        assert names == []
        assert not initialized


def end_without_close(rank: int, size: int, port: int, leave: bool) -> int:
    transport = by_variables(rank, size, port)
    transport.all_reduce_(torch.ones(10_000)).wait()
    if rank == 1:
        if leave:
            sys.exit(3)
        raise KeyError("gone")
    with pytest.raises(PeerError) as caught:
        transport.receive_(torch.ones(4), 1).wait()
    transport.close()
    return caught.value.failure.rank


@pytest.mark.parametrize("leave", [False, True])
def test_a_rank_that_ends_without_close_is_missed_at_once(workers: Workers, leave: bool) -> None:
    results = workers.run(2, end_without_close, free_port(), leave, timeout_s=20.0)
    assert results[0] == 1
    if leave:
        assert isinstance(results[1], ProcessDied)
        assert "exit code 3" in str(results[1])
    else:
        assert isinstance(results[1], KeyError)


def stop(rank: int, size: int, port: int) -> Any:
    transport = by_variables(rank, size, port, timeout_s=2.0)
    tensor = torch.ones(1_000_000)
    pids = transport.gather_objects(os.getpid())
    transport.all_reduce_(tensor).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(DeadlineError, match="rank 1 did not arrive"):
        transport.all_reduce_(tensor).wait()
    began = time.monotonic()
    transport.fail(Failure(rank=0, error="DeadlineError", message="rank 1"))
    transport.close()
    took = time.monotonic() - began
    os.kill(pids[1], signal.SIGKILL)
    return took


def test_a_stopped_rank_holds_nobody_up(workers: Workers) -> None:
    results = workers.run(2, stop, free_port())
    assert isinstance(results[0], float), results[0]
    assert results[0] < 8.0
    assert isinstance(results[1], ProcessDied)


def beside_other_collectives(rank: int, size: int, port: int) -> list[float]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    transport, other = TorchDistributedTransport(30.0), TorchDistributedTransport(30.0)
    ours, yours, theirs = torch.ones(50_000), torch.ones(50_000), torch.ones(50_000)
    work = transport.all_reduce_(ours)
    # The ranks use the groups in different orders, which only groups of their own allow.
    if rank == 0:
        other.all_reduce_(yours).wait()
        dist.all_reduce(theirs)
    else:
        waiting = other.all_reduce_(yours)
        dist.all_reduce(theirs)
        waiting.wait()
    work.wait()
    transport.close()
    other.close()
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return [tensor[0].item() for tensor in (ours, yours, theirs)]


def test_it_goes_beside_other_collectives_and_leaves_their_group(workers: Workers) -> None:
    results = workers.run(2, beside_other_collectives, free_port())
    assert results == [[2.0, 2.0, 4.0]] * 2


def test_one_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    threads = threading.active_count()
    transport = TorchDistributedTransport(5.0)
    tensor = torch.arange(5_000.0)
    transport.all_reduce_(tensor).wait()
    transport.barrier()
    assert torch.equal(transport.gather(tensor)[0], torch.arange(5_000.0))
    assert transport.gather_objects("one") == ["one"]
    assert threading.active_count() == threads
    assert not dist.is_initialized()
    transport.fail(Failure(rank=0, error="ValueError", message="mine"))
    with pytest.raises(PeerError, match="mine"):
        transport.barrier()
    transport.close()
    with pytest.raises(UsageError, match="after close"):
        transport.barrier()


def test_without_a_group_or_variables_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"RANK, .*torchrun"):
        TorchDistributedTransport()


def come_alone(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    TorchDistributedTransport(join_timeout_s=2.0)


def test_a_rank_that_is_not_started_ends_in_a_deadline(workers: Workers) -> None:
    (result,) = workers.run(1, come_alone, free_port(), timeout_s=30.0)
    assert isinstance(result, DeadlineError)
    assert "could not join" in str(result)
