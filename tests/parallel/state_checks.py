"""What every rank asserts about buffers, uneven inputs, copies and failures in the tests of DistributedDataParallel."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import DeadlineError, PeerError, UsageError
from tests.parallel.modules import WIDTH, assert_same, batchnorm, gradients, mlp, twins, x_of
from tests.parallel.ranks import ROWS, Check, loss_of, parts, wrap


def batchnorm_statistics(rank: int, size: int) -> None:
    """After every synchronised backward all ranks hold the statistics of all ranks' forwards, in rank order (G1)."""
    for momentum in (0.1, None):
        module, reference = twins(lambda momentum=momentum: batchnorm(momentum))
        model = wrap(module)
        for step in range(3):
            with model.no_sync():
                loss_of(model(parts(size, step)[rank])).backward()
            loss_of(model(parts(size, step + 5)[rank])).backward()
            for x, y in zip(parts(size, step), parts(size, step + 5), strict=True):
                reference(x)
                reference(y)
            assert_same(dict(module.named_buffers()), dict(reference.named_buffers()))
        with torch.no_grad():  # what a rank does on its own is not what all ranks go on from
            module(x_of(2 + rank, rank))
        for _ in range(2):
            loss_of(model(parts(size)[rank])).backward()
            held = [buffer.tolist() for buffer in module.buffers()]
            everyone: list[Any] = [None] * size
            dist.all_gather_object(everyone, held)
            assert all(other == held for other in everyone)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.total += x.sum().detach()
        return self.layer(x)


def other_buffers(rank: int, size: int) -> None:
    """A buffer that ranks change alike is left alone; one that they change apart is refused by name, or merged by its rule."""
    model = wrap(Keeping())
    with pytest.raises(UsageError, match="'total'"):
        loss_of(model(parts(size)[rank])).backward()
    merged = Keeping()
    model = wrap(merged, buffers={"total": "sum"})
    for _ in range(2):
        loss_of(model(parts(size)[rank])).backward()
    torch.testing.assert_close(merged.total, 2 * torch.cat(parts(size)).sum())
    assert float(merged.steps) == 2


def join_uneven(rank: int, size: int) -> None:
    """Ranks with 1, 2, 3, ... batches: nobody waits in vain, the average is over those who have one, and all end up alike."""
    module, reference = twins(batchnorm)
    model = wrap(module, bucket_bytes=64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with model.join(optimizer):
        for step in range(rank + 1):
            optimizer.zero_grad()
            loss_of(model(parts(size, step)[rank])).backward()
            optimizer.step()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(size):
        plain.zero_grad()
        for other in range(step, size):
            (loss_of(reference(parts(size, step)[other])) / (size - step)).backward()
        plain.step()
    assert_same(dict(module.state_dict()), dict(reference.state_dict()))
    for (_, one), (_, two) in zip(module.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[one]["momentum_buffer"], plain.state[two]["momentum_buffer"])
    optimizer.zero_grad()
    with model.join():  # and again, with counts
        for step in range(size - rank):
            optimizer.zero_grad()
            model.backward(model(x_of(2 + rank, step)).square().sum(1).mean(), count=2 + rank)
    loss_of(model(parts(size)[rank])).backward()


def leave_early(rank: int, size: int) -> None:
    """Without `join` a rank that is done and gone is found within seconds, one that stays by the deadline (B1)."""
    model = wrap(mlp())
    for _ in range(2):
        loss_of(model(parts(size)[rank])).backward()
    began = time.monotonic()
    if rank > 0:
        with pytest.raises(PeerError) as left:
            loss_of(model(parts(size)[rank])).backward()
        assert left.value.failure.error == "WorkerLeft"
        assert "join()" in left.value.__notes__[0]
    model.close()
    assert time.monotonic() - began < 6
    model = wrap(mlp(), timeout_s=1.5)
    loss_of(model(parts(size)[rank])).backward()
    if rank > 0:
        with pytest.raises((DeadlineError, PeerError), match=r"rank 0|another worker") as caught:
            loss_of(model(parts(size)[rank])).backward()
        assert "join()" in caught.value.__notes__[0]
    dist.barrier()


def fail_in_join(rank: int, size: int) -> None:
    model = wrap(mlp())

    def loop() -> None:
        with model.join():
            for step in range(3):
                if rank == 1 and step == 1:
                    raise ValueError("too hot")
                loss_of(model(parts(size)[rank])).backward()

    with pytest.raises(ValueError if rank == 1 else PeerError, match="too hot"):
        loop()


def states(rank: int, size: int) -> None:
    """Saving is not collective, names are the bare module's, copies evaluate and do not train."""
    module = batchnorm()
    model = wrap(module)
    loss_of(model(parts(size)[rank])).backward()
    if rank == 0:
        saved = model.state_dict()
        assert list(saved) == list(module.state_dict())
        plain = batchnorm()
        plain.load_state_dict(saved)
        model.load_state_dict({f"module.{key}": value for key, value in plain.state_dict().items()})
    twin = copy.deepcopy(model)
    for other in (twin, pickle.loads(pickle.dumps(twin))):
        with torch.no_grad():
            assert other.eval()(parts(size)[rank]).shape == (ROWS, 2)
        with pytest.raises(UsageError, match="copy"):
            other(parts(size)[rank])
    loss_of(model(parts(size)[rank])).backward()


def go_on_after_a_failure(rank: int, size: int) -> None:
    """A forward or a backward that fails before anything has left, on all ranks or one, does not spoil the next."""
    module, reference = twins(mlp)
    model = wrap(module)

    def fail(gradient: Tensor) -> None:
        raise ValueError("in backward")

    output = model(parts(size)[rank])
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, WIDTH + 1))
        assert "rank 0, forward" in caught.value.__notes__
    again = model(parts(size)[rank])
    again.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        (again * 1.0).sum().backward()
    del output
    module.zero_grad()
    loss_of(model(parts(size)[rank])).backward()
    loss_of(reference(torch.cat(parts(size)))).backward()
    assert_same(gradients(module), gradients(reference))


def user_collectives(rank: int, size: int) -> None:
    """A program's own collectives may go on beside it, and deletion leaves the module usable and no thread."""
    module = mlp()
    model = wrap(module)
    loss_of(model(parts(size)[rank])).backward()
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [float(size)] * 3
    del model
    gc.collect()
    loss_of(module(parts(size)[rank])).backward()


CHECKS: tuple[Check, ...] = (
    batchnorm_statistics,
    other_buffers,
    join_uneven,
    leave_early,
    fail_in_join,
    states,
    go_on_after_a_failure,
    user_collectives,
)
