"""What ranks say to each other about a collective call, so that a disagreement is found before data moves, and told in words."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.errors import Failure, PacelineError, PeerError, UsageError
from paceline.transport.base import Order


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective: what must agree (`key`), and what may differ but is good to know (the rest)."""

    op: str
    number: int
    what: str = ""
    """The tensor, such as `float32[4, 2]`, and of a sum its label."""
    to: str = ""
    """Owner or source, as words."""
    order: str = ""
    """A digest of the order of a sum."""
    parts: int = 0
    """How many parts this rank brings to a sum; 1 for a gather whose tensor does not come along with the call."""

    @property
    def key(self) -> tuple[str, int, str, str, str]:
        """What every rank must have in common; the tensors of a `gather` may differ."""
        return (self.op, self.number, "" if self.op == "gather" else self.what, self.to, self.order)

    def fields(self) -> list[str | int]:
        """Return the fields in order; `dataclasses.astuple` takes longer than sending them."""
        return [self.op, self.number, self.what, self.to, self.order, self.parts]

    def __str__(self) -> str:
        order = f" in order {self.order}" if self.order else ""
        return f"{self.op} number {self.number + 1}" + (f" of {self.what}" if self.what else "") + self.to + order


@dataclass(frozen=True, slots=True)
class Broken:
    """Why an end of a group is of no use any more: a recipe for fresh exceptions, as one object must not be raised twice."""

    kind: type[PacelineError]
    argument: Any

    def error(self) -> PacelineError:
        """Return a new exception that says it."""
        return self.kind(self.argument)


def describe(tensor: Tensor) -> str:
    """Return shape and dtype in short, such as `float32[4, 2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def sum_call(
    number: int, out: Tensor, parts: Sequence[Tensor], owner: int | None, order: Order | None, label: str, size: int
) -> Call:
    """Return the words for a sum after checking what one rank alone can check.

    Raises:
        UsageError: A part differs from `out`, or `owner` is no rank.
    """
    for index, part in enumerate(parts):
        if part.shape != out.shape or part.dtype != out.dtype:
            raise UsageError(
                f"sum_ was given part {index} of {describe(part)} for an out of {describe(out)}; "
                "give parts of the shape and dtype of out"
            )
    to = "" if owner is None else f" to rank {check_rank(owner, size, 'owner')}"
    digest = "" if order is None else hashlib.sha256(repr(order).encode()).hexdigest()[:12]
    return Call("sum_", number, describe(out) + (f" ({label})" if label else ""), to, digest, len(parts))


def check_rank(rank: int, size: int, word: str, own: int | None = None) -> int:
    """Return `rank` if it is one of the group's, and another than `own` where that is given.

    Raises:
        UsageError: It is not.
    """
    if not 0 <= rank < size or rank == own:
        other = "" if own is None else f" other than {own}, the rank itself"
        raise UsageError(f"{word} {rank} was given; allowed are the ranks 0 to {size - 1}{other}")
    return rank


def mismatch(first: int, call: object, second: int, other: object) -> str:
    """Return the words for two calls that should be the same."""
    return f"rank {first} called {call}, rank {second} called {other}; every rank must make the same calls in the same order"


def deadline(rank: int, timeout_s: float, call: object, missing: Sequence[int], hint: str = "did not arrive") -> str:
    """Return the words for a wait that took too long."""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} {hint}" if missing else hint
    return (
        f"rank {rank} waited {timeout_s:g} s in {call}: {who}; "
        "find out what keeps it from the same call, or give the transport a longer timeout_s"
    )


def by_rank(counts: Sequence[int]) -> Order | None:
    """Return the order that adds all parts one after the other, rank by rank; None where there are none."""
    result: Order | None = None
    for rank, count in enumerate(counts):
        for part in range(count):
            result = (rank, part) if result is None else (result, (rank, part))
    return result


def is_leaf(order: Order) -> bool:
    """Say whether `order` is one part rather than a sum."""
    return isinstance(order[0], int)


def leaves(order: Order) -> list[tuple[int, int]]:
    """Return the parts that `order` names, from left to right."""
    result: list[tuple[int, int]] = []
    open_: list[Order] = [order]
    while open_:
        node = open_.pop()
        if is_leaf(node):
            result.append(cast("tuple[int, int]", node))
        else:
            left, right = cast("tuple[Order, Order]", node)
            open_ += [right, left]
    return result


def check_order(order: Order, counts: Sequence[int]) -> None:
    """Check that `order` names every part of every rank once.

    Raises:
        UsageError: It does not.
    """
    named = sorted(leaves(order))
    brought = [(rank, part) for rank, count in enumerate(counts) for part in range(count)]
    if named != brought:
        wrong = sorted(set(named) ^ set(brought)) or sorted({leaf for leaf in named if named.count(leaf) > 1})
        raise UsageError(
            f"the order of a sum names {len(named)} parts where the ranks brought {list(counts)}; "
            f"it must name each (rank, part) once, which is not so for {wrong[:4]}"
        )


def evaluate(order: Order, leaf: Callable[[int, int], Tensor], scratch: Callable[[int], Tensor], depth: int = 0) -> Tensor:
    """Return the sum that `order` describes, as a part itself or in `scratch(0)`; `a + b` at every node, no part is written."""
    if is_leaf(order):
        return leaf(*cast("tuple[int, int]", order))
    left, right = cast("tuple[Order, Order]", order)
    a = evaluate(left, leaf, scratch, depth)
    b = evaluate(right, leaf, scratch, depth + 1)
    return torch.add(a, b, out=scratch(depth))


def bounds(numel: int, count: int) -> list[tuple[int, int]]:
    """Return the start and the end of `count` slices of `numel` elements that are as even as can be."""
    edges = [numel * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))


def peer_error(failure: Failure) -> Broken:
    """Return the recipe for the `PeerError` of a failure."""
    return Broken(PeerError, failure)


def left_early(rank: int, call: object) -> Failure:
    """Return the record of a rank that closed its transport, without a word, while another still needed it."""
    return Failure(rank=rank, error="WorkerLeft", message=f"closed its transport while another rank waited for it in {call}")
