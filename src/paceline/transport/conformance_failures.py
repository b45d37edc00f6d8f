"""The promises of a transport for when something goes wrong; part of `conformance`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.errors import DeadlineError, Failure, MismatchError, PacelineError, PeerError, UsageError
from paceline.transport.base import Transport

FAILURE = Failure(rank=1, error="ValueError", message="no such token: ü", step=3, micro_batch=1, doing="forward", trace="...")

SOON_S = 6.0
"""What "within seconds" means, on a busy machine."""


def _receive(transport: Transport) -> None:
    transport.receive_(torch.zeros(9), transport.size - 1).wait()


def _send(transport: Transport) -> None:
    transport.send(torch.zeros(9), transport.size - 1).wait()


def _sum(transport: Transport) -> None:
    transport.all_reduce_(torch.zeros(9)).wait()


def _large_sum(transport: Transport) -> None:
    transport.all_reduce_(torch.zeros(90_000)).wait()


def _owned_sum(transport: Transport) -> None:
    transport.reduce_(torch.zeros(9), owner=0).wait()


def _gather(transport: Transport) -> None:
    transport.gather(torch.zeros(9))


def _broadcast(transport: Transport) -> None:
    transport.broadcast_(torch.zeros(9), transport.size - 1)


def _barrier(transport: Transport) -> None:
    transport.barrier()


WAITS: tuple[Callable[[Transport], None], ...] = (_receive, _send, _sum, _large_sum, _owned_sum, _gather, _broadcast, _barrier)


def _stay_away(transport: Transport, wait: Callable[[Transport], None]) -> float | None:
    """The last rank never comes, and the others wait for it; return how long they waited."""
    if transport.rank == transport.size - 1:
        time.sleep(transport.timeout_s + 0.7)
        return None
    began = time.monotonic()
    try:
        wait(transport)
    except DeadlineError as error:
        words = str(error)
        assert f"rank {transport.size - 1}" in words, words
        assert f"{transport.timeout_s:g} s" in words, words
        for _ in range(2):
            try:
                transport.barrier()
            except PacelineError:
                continue
            raise AssertionError("a transport went on after a deadline") from error
        return time.monotonic() - began
    raise AssertionError("nothing was raised")


def a_rank_that_never_comes_ends_in_deadlines(run: Any) -> None:
    """Every wait ends at the time-out, and says who did not come."""
    for size, wait in ((2, _receive), (2, _send), (3, _large_sum), (3, _gather), (2, _barrier)):
        for rank, waited in enumerate(run(size, partial(_stay_away, wait=wait), timeout_s=1.0)[:-1]):
            if not isinstance(waited, float) or not 0.9 < waited < SOON_S:
                raise AssertionError(f"rank {rank} in {wait.__name__}: {waited!r}")


def _fail(transport: Transport, wait: Callable[[Transport], None], early: bool, failing: int) -> float | None:
    """One rank announces a failure, before or while the others wait; return how long they took to raise it."""
    if transport.rank == failing:
        if not early:
            time.sleep(0.3)
        transport.fail(FAILURE)
        transport.fail(Failure(rank=0, error="Other", message="later"))
        return None
    if early:
        time.sleep(0.3)
    began = time.monotonic()
    for _ in range(2):
        try:
            wait(transport)
        except PeerError as error:
            if error.failure != FAILURE:
                raise AssertionError(f"another failure: {error.failure}") from error
            transport.fail(Failure.of(error, rank=transport.rank))
        else:
            raise AssertionError("nothing was raised")
    return time.monotonic() - began


def the_first_failure_reaches_everyone(run: Any) -> None:
    """Whatever the others wait for, now or later, raises a `PeerError` with the failure that was announced first."""
    cases = [(2, wait, False) for wait in WAITS] + [(2, wait, True) for wait in (_send, _large_sum, _barrier)]
    cases += [(3, _large_sum, False), (3, _receive, False)]
    for size, wait, early in cases:
        results = run(size, partial(_fail, wait=wait, early=early, failing=size - 1))
        for rank, waited in enumerate(results[:-1]):
            if not isinstance(waited, float) or waited > SOON_S:
                raise AssertionError(f"rank {rank} in {wait.__name__}, early={early}: {waited!r}")


def _fail_at_once(transport: Transport) -> Failure:
    transport.fail(Failure(rank=transport.rank, error="ValueError", message="mine"))
    try:
        transport.barrier()
    except PeerError as error:
        time.sleep(0.5)
        return error.failure
    raise AssertionError("nothing was raised")


def failures_at_once_become_one(run: Any) -> None:
    """Where all ranks fail at the same time, one failure is the first, and every rank reports that one."""
    results = run(3, _fail_at_once)
    if not isinstance(results[0], Failure) or any(result != results[0] for result in results):
        raise AssertionError(f"not one failure: {results}")


def _leave(transport: Transport) -> None:
    if transport.rank != 1:
        transport.barrier()


def a_rank_that_leaves_is_missed(run: Any) -> None:
    """Whoever waits for a rank that has closed its transport gets a `PeerError` that names it, not a deadline."""
    results = run(3, _leave)
    for rank in (0, 2):
        if not isinstance(results[rank], PeerError) or results[rank].failure.rank != 1:
            raise AssertionError(f"rank {rank}: {results[rank]!r}")


def _opposite_orders(transport: Transport) -> None:
    tensors = [torch.ones(9), torch.full((9,), 2.0)]
    order = (0, 1) if transport.rank == 0 else (1, 0)
    for work in [transport.all_reduce_(tensors[index], label=f"bucket {index}") for index in order]:
        work.wait()


def _shapes(transport: Transport) -> None:
    transport.all_reduce_(torch.ones(9_000 + (transport.rank == 1))).wait()


def _shapes_of_equal_size(transport: Transport) -> None:
    transport.all_reduce_(torch.ones((2, 3) if transport.rank == 1 else (3, 2))).wait()


def _dtypes(transport: Transport) -> None:
    transport.all_reduce_(torch.ones(9, dtype=torch.int32 if transport.rank == 1 else torch.float32)).wait()


def _owners(transport: Transport) -> None:
    transport.reduce_(torch.ones(9_000), owner=transport.rank % 2).wait()


def _orders(transport: Transport) -> None:
    leaves = [(rank, 0) for rank in range(transport.size)]
    order: Any = leaves[0]
    for leaf in leaves[1:]:
        order = (leaf, order) if transport.rank == 1 else (order, leaf)
    out = torch.ones(9_000)
    transport.sum_(out, [out], order=order).wait()


def _calls(transport: Transport) -> None:
    if transport.rank == 1:
        transport.gather(torch.ones(9))
    else:
        transport.all_reduce_(torch.ones(9)).wait()


def _barrier_and_sum(transport: Transport) -> None:
    if transport.rank == 1:
        transport.barrier()
    else:
        transport.all_reduce_(torch.ones(90_000)).wait()


def _sources(transport: Transport) -> None:
    transport.broadcast_(torch.ones(9), source=transport.rank % 2)


def _broadcast_shapes(transport: Transport) -> None:
    transport.broadcast_(torch.ones(9 + transport.rank % 2), source=0)


COLLECTIVES: tuple[Callable[[Transport], None], ...] = (
    _opposite_orders,
    _shapes,
    _shapes_of_equal_size,
    _dtypes,
    _owners,
    _orders,
    _calls,
    _barrier_and_sum,
    _sources,
    _broadcast_shapes,
)


def _all_disagree(results: Sequence[Any], case: str) -> None:
    """Check that every rank got an error, and one a `MismatchError` that names rank 1, the odd one, and another."""
    if not all(isinstance(result, PacelineError) for result in results):
        raise AssertionError(f"{case}: a rank got through: {results}")
    words = [str(result) for result in results if isinstance(result, MismatchError)]
    if not any("rank 1 " in text and ("rank 0 " in text or "rank 2 " in text) for text in words):
        raise AssertionError(f"{case}: no rank said who disagrees: {results}")


def calls_that_differ_are_found(run: Any) -> None:
    """Ranks that call different things all get an error, before data moves; one is told both calls."""
    for size, bodies in ((2, COLLECTIVES), (3, (_shapes, _calls))):
        for body in bodies:
            _all_disagree(run(size, body, timeout_s=5.0), body.__name__)


def _message(transport: Transport, sent: torch.Tensor, expected: torch.Tensor) -> None:
    if transport.rank == 0:
        transport.send(sent, 1).wait()
    else:
        transport.receive_(expected, 0).wait()


def messages_that_differ_are_found(run: Any) -> None:
    """A message of another shape or dtype than is expected is an error at both ends, and fills nothing."""
    for sent, expected in (
        (torch.ones(8), torch.zeros(4)),
        (torch.ones(4), torch.zeros(8)),
        (torch.ones(4), torch.zeros(4, dtype=torch.int32)),
        (torch.ones(2, 2), torch.zeros(4)),
    ):
        _all_disagree(run(2, partial(_message, sent=sent, expected=expected), timeout_s=5.0), f"{sent} to {expected}")


def _misuse(transport: Transport) -> int:
    one, refused = torch.ones(4), 0
    for call in (
        lambda: transport.send(one, transport.size),
        lambda: transport.receive_(one, transport.rank),
        lambda: transport.sum_(one, [torch.ones(5)]),
        lambda: transport.sum_(one, [one.double()]),
        lambda: transport.reduce_(one, owner=-1),
        lambda: transport.broadcast_(one, source=transport.size),
    ):
        try:
            call()
        except UsageError:
            refused += 1
    transport.barrier()
    try:
        transport.sum_(one, [one], order=((0, 0), (0, 0))).wait()
    except UsageError:
        refused += 1
    return refused


def misuse_is_refused(run: Any) -> None:
    """What one rank can see to be wrong is refused there, and leaves the group as it was; so is a wrong order, by all."""
    results = run(2, _misuse)
    if results != [7, 7]:
        raise AssertionError(f"of 7 wrong calls were refused: {results}")


CHECKS: tuple[Callable[[Any], None], ...] = (
    a_rank_that_never_comes_ends_in_deadlines,
    the_first_failure_reaches_everyone,
    failures_at_once_become_one,
    a_rank_that_leaves_is_missed,
    calls_that_differ_are_found,
    messages_that_differ_are_found,
    misuse_is_refused,
)
