"""The promises of a transport as checks that anyone can run against an implementation of their own.

A check takes a `Run`, which runs a body once per rank of a new group, and raises `AssertionError` where a promise is broken:

    for check in CHECKS:
        check(run)

Bodies are module-level functions, or `functools.partial` of them, so that a `Run` may send them to other processes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.transport import conformance_failures as failures
from paceline.transport.base import Order, Transport
from paceline.transport.calls import evaluate


class Run(Protocol):
    """How a check gets its ranks."""

    def __call__(self, size: int, body: Callable[[Transport], Any], timeout_s: float = 30.0) -> list[Any]:
        """Make a group, call `body(transport)` on each rank at once, close each rank's transport when its body has ended.

        Return per rank what the body returned, or the exception that it raised.
        """


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16)


def expect_equal(results: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Check that every rank returned what it should, bit for bit."""
    for rank, (result, want) in enumerate(zip(results, wanted, strict=True)):
        if isinstance(result, BaseException):
            raise AssertionError(f"rank {rank} raised {result!r}") from result
        if not _same(result, want):
            raise AssertionError(f"rank {rank} returned {result}, wanted {want}")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def values(rank: int, part: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of a part: the same wherever they are computed, and such that the order of a sum shows."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + part), dtype=torch.float64)
    return (numbers * 100).to(dtype)


def balanced(leaves: Sequence[tuple[int, int]]) -> Order:
    """Return the balanced binary order over `leaves`."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    return (balanced(leaves[:half]), balanced(leaves[half:]))


def _exchange(transport: Transport, count: int, numel: int) -> list[Tensor]:
    other = 1 - transport.rank
    targets = [torch.zeros(numel) for _ in range(count)]
    works = [transport.receive_(target, other, tag=index % 2) for index, target in enumerate(targets)]
    # Within a tag the order holds; the tags themselves go the other way round.
    order = [*range(1, count, 2), *range(0, count, 2)]
    works += [transport.send(torch.full((numel,), 10.0 * transport.rank + index), other, tag=index % 2) for index in order]
    for work in reversed(works):
        work.wait()
        work.wait()
    return targets


def messages_keep_their_order(run: Run) -> None:
    """Messages of one tag arrive in order, both ways at once, with tags and waits in any order."""
    for numel in (3, 100_000):
        wanted = [[torch.full((numel,), 10.0 * (1 - rank) + index) for index in range(6)] for rank in range(2)]
        expect_equal(run(2, partial(_exchange, count=6, numel=numel)), wanted)


def _strided(transport: Transport) -> Any:
    source = torch.arange(12.0).view(3, 4)
    if transport.rank == 0:
        transport.send(source.t(), 1).wait()
        transport.send(source.to(torch.bool)[0, 1], 1).wait()
        transport.send(torch.empty(0, 4), 1).wait()
        return None
    target, single, empty = torch.zeros(8, 3)[::2], torch.tensor(False), torch.empty(0, 4)
    for tensor in (target, single, empty):
        transport.receive_(tensor, 0).wait()
    return target, target.stride(), single


def received_tensors_keep_strides(run: Run) -> None:
    """Scattered tensors are sent and received as they lie; scalars and empty tensors pass."""
    wanted = (torch.arange(12.0).view(3, 4).t(), (6, 1), torch.tensor(True))
    expect_equal(run(2, _strided), [None, wanted])


def _sum_case(
    transport: Transport,
    counts: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    owner: int | None,
    order: Order | None,
    lie: str,
) -> Tensor | None:
    parts = [values(transport.rank, part, shape, dtype) for part in range(counts[transport.rank])]
    if lie == "scattered":
        parts = [part.t().contiguous().t() for part in parts]
    if lie == "apart" or not parts:
        out = torch.zeros(*shape, dtype=dtype)
    else:
        out = parts[-1]
    transport.sum_(out, parts, owner=owner, order=order).wait()
    return out if owner in (None, transport.rank) else None


def _cases(transport: Transport, cases: Sequence[dict[str, Any]]) -> list[Tensor | None]:
    return [_sum_case(transport, **case) for case in cases]


def _expected(case: dict[str, Any], order: Order) -> Tensor:
    return evaluate(
        order,
        lambda rank, part: values(rank, part, case["shape"], case["dtype"]),
        lambda depth: torch.empty(case["shape"], dtype=case["dtype"]),
    )


def _leaves(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(rank, part) for rank, count in enumerate(counts) for part in range(count)]


def ordered_sums_have_the_same_bits(run: Run) -> None:
    """With `order`, a sum has the bits of its additions done in one place: any dtype, size, number of parts, owner."""
    for size, counts in ((1, (3,)), (2, (1, 1)), (2, (3, 0)), (3, (2, 1, 4)), (4, (1, 1, 1, 1))):
        leaves = _leaves(counts)
        mixed: Order = leaves[-1]
        for leaf in leaves[:-1]:
            mixed = (leaf, mixed)
        cases: list[dict[str, Any]] = [
            {"counts": counts, "shape": shape, "dtype": dtype, "owner": owner, "order": order, "lie": lie}
            for (shape, lie), (dtype, owner), order in itertools.product(
                [((5, 3), "scattered"), ((0, 2), "apart"), ((101, 97), "in place")],
                [(torch.float32, None), (torch.float16, None), (torch.bfloat16, size - 1), (torch.int16, 0)],
                [balanced(leaves), mixed],
            )
        ]
        wanted = [
            [_expected(case, case["order"]) if case["owner"] in (None, rank) else None for case in cases] for rank in range(size)
        ]
        expect_equal(run(size, partial(_cases, cases=cases)), wanted)


def sums_are_right(run: Run) -> None:
    """Without `order`, a sum is right to rounding: any dtype, odd sizes, scattered tensors, no parts, many parts, owner."""
    for size, counts in ((1, (1,)), (2, (1, 1)), (3, (0, 3, 1)), (2, (0, 0))):
        cases: list[dict[str, Any]] = [
            {"counts": counts, "shape": shape, "dtype": dtype, "owner": owner, "order": None, "lie": lie}
            for dtype, owner, (shape, lie) in itertools.product(
                DTYPES, (None, size - 1), [((7, 1), "in place"), ((53, 201), "scattered"), ((3, 5001), "apart"), ((0, 3), "apart")]
            )
        ]
        for rank, result in enumerate(run(size, partial(_cases, cases=cases))):
            if isinstance(result, BaseException):
                raise AssertionError(f"rank {rank} of {size} raised {result!r}") from result
            for case, out in zip(cases, result, strict=True):
                _expect_near(case, out, rank)


def _expect_near(case: dict[str, Any], out: Tensor | None, rank: int) -> None:
    if case["owner"] not in (None, rank):
        return
    dtype = case["dtype"]
    wanted = torch.zeros(case["shape"], dtype=torch.float64)
    for leaf in _leaves(case["counts"]):
        wanted += values(*leaf, case["shape"], dtype).double()
    # Every partial sum rounds, and terms of a few hundred may cancel.
    allowed = 0.0 if not dtype.is_floating_point else 4 * 800 * torch.finfo(dtype).eps
    if out is None or out.dtype != dtype or not torch.allclose(out.double(), wanted, rtol=0.0, atol=allowed):
        raise AssertionError(f"rank {rank}: the sum of {case} is wrong")


def _in_flight(transport: Transport, numel: int) -> list[Tensor]:
    tensors = [torch.full((numel,), float(transport.rank + index)) for index in range(6)]
    works = [transport.all_reduce_(tensor) for tensor in tensors[:5]] + [transport.reduce_(tensors[5], owner=0)]
    transport.barrier()
    # One rank waits from the front and one from the back.
    for work in works if transport.rank else reversed(works):
        work.wait()
    return tensors[: 5 if transport.rank else 6]


def works_may_be_waited_for_in_any_order(run: Run) -> None:
    """Several sums are under way at once, with other calls in between, and their waits come in any order."""
    for numel in (4, 50_001):
        wanted = [[torch.full((numel,), 1.0 + 2 * index) for index in range(6 - rank)] for rank in range(2)]
        expect_equal(run(2, partial(_in_flight, numel=numel)), wanted)


def _sum_then_message(transport: Transport) -> Tensor:
    total, note = torch.ones(50_000), torch.zeros(1)
    work = transport.all_reduce_(total)
    if transport.rank == 0:
        transport.receive_(note, 1).wait()
        work.wait()
    else:
        work.wait()
        transport.send(torch.ones(1), 0).wait()
    return total + note[0] * 0


def a_rank_may_wait_for_a_sum_alone(run: Run) -> None:
    """A sum ends for one rank although another, which has called it, waits for something else first."""
    expect_equal(run(2, _sum_then_message), [torch.full((50_000,), 2.0)] * 2)


def _gathers(transport: Transport) -> Any:
    own = torch.arange(transport.rank * 4000, dtype=torch.float64 if transport.rank else torch.int32)
    gathered = transport.gather(own)
    own += 1
    square = transport.gather(torch.full((2, 3), transport.rank).t())
    objects = transport.gather_objects({"rank": transport.rank, "text": "x" * 5000 * transport.rank})
    return gathered, square, [value["rank"] for value in objects], [len(value["text"]) for value in objects]


def gathers_are_uneven(run: Run) -> None:
    """Gathered tensors and objects come in rank order whatever their shapes and dtypes, as copies."""
    for size in (1, 3):
        tensors = [torch.arange(rank * 4000, dtype=torch.float64 if rank else torch.int32) for rank in range(size)]
        square = [torch.full((3, 2), rank) for rank in range(size)]
        lengths = [5000 * rank for rank in range(size)]
        expect_equal(run(size, _gathers), [(tensors, square, list(range(size)), lengths)] * size)


def _broadcasts(transport: Transport) -> list[Tensor]:
    result = []
    for source, numel in ((transport.size - 1, 5), (0, 20_000), (0, 0)):
        parameter = torch.nn.Parameter(torch.full((numel, 2), float(transport.rank)))
        scattered = torch.full((2, numel), transport.rank).t()
        transport.broadcast_(parameter, source)
        transport.broadcast_(scattered, source)
        result += [parameter.detach().clone(), scattered]
    return result


def broadcasts_reach_all(run: Run) -> None:
    """Every rank gets the source's tensor, into parameters and scattered tensors too."""
    for size in (1, 2, 3):
        wanted = []
        for source, numel in ((size - 1, 5), (0, 20_000), (0, 0)):
            wanted += [torch.full((numel, 2), float(source)), torch.full((numel, 2), source)]
        expect_equal(run(size, _broadcasts), [wanted] * size)


def _names(transport: Transport) -> tuple[int, int, bool]:
    for _ in range(20):
        transport.barrier()
    return transport.rank, transport.size, bool(transport.name) and transport.timeout_s > 0


def barriers_pass(run: Run) -> None:
    """Ranks count from 0, and barriers let everyone through."""
    expect_equal(run(3, _names), [(rank, 3, True) for rank in range(3)])


def _close_twice(transport: Transport) -> list[str]:
    # Once all ranks have come, none of them is still to start where they are threads themselves.
    transport.barrier()
    before = set(threading.enumerate())
    transport.all_reduce_(torch.ones(30_000)).wait()
    transport.close()
    transport.close()
    return [thread.name for thread in threading.enumerate() if thread not in before]


def close_leaves_nothing(run: Run) -> None:
    """`close` ends what the transport started, may be repeated, and does not depend on when the others close."""
    expect_equal(run(2, _close_twice), [[], []])


CHECKS: tuple[Callable[[Run], None], ...] = (
    messages_keep_their_order,
    received_tensors_keep_strides,
    ordered_sums_have_the_same_bits,
    sums_are_right,
    works_may_be_waited_for_in_any_order,
    a_rank_may_wait_for_a_sum_alone,
    gathers_are_uneven,
    broadcasts_reach_all,
    barriers_pass,
    close_leaves_nothing,
    *failures.CHECKS,
)
"""Every promise, as a function named after it."""
