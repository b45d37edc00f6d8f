"""How workers reach each other: the seam that every transport implements and the conformance suite puts to the test.

A transport knows ranks and tensors, and nothing of models, steps or plans. All collectives (`sum_`, `gather`,
`broadcast_`, `barrier`) must be called by every rank, in the same order, with the same signature; a rank that calls
something else raises `MismatchError` on some rank and an error on every other, never a mixed result. Every wait ends by
the transport's time-out (`DeadlineError`), and at once when another rank has failed (`PeerError` with the first failure).
An error is raised by the call or by its `wait`; after one, this end of the group raises it again whatever is called, save
`fail` and `close`. A deadline or an error of its own is not announced by the transport: a worker that stops because of one
calls `fail`, so that the others stop too. Works may be waited for in any order. Tensors that require gradients are written
as plain memory. Every rank's calls come from one thread, or from threads that take turns.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.errors import Failure

Order: TypeAlias = "tuple[Order, Order] | tuple[int, int]"
"""The order of a sum: a leaf `(rank, part)` is that rank's `parts[part]`, a pair of orders is the sum of both."""


class Work(ABC):
    """Communication that was started; `wait` ends it."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the tensors may be used again; raise what went wrong. A second call returns at once."""


class Transport(ABC):
    """One rank's end of a group of workers. `name` is the word users choose it by; `timeout_s` bounds every wait, in seconds."""

    name: str
    rank: int
    size: int
    timeout_s: float

    @abstractmethod
    def send(self, tensor: Tensor, destination: int, tag: int = 0) -> Work:
        """Start sending `tensor` to another rank without blocking; it must not change before `wait` returns.

        Messages between two ranks with one tag arrive in order. `wait` may last until the destination has called
        `receive_`: two ranks that exchange tensors both call `send` and `receive_` before either waits.
        """

    @abstractmethod
    def receive_(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        """Start receiving into `tensor`, which keeps its strides.

        Raises:
            MismatchError: The message has another shape or dtype; raised by `wait`, and by the sender's.
        """

    @abstractmethod
    def sum_(
        self, out: Tensor, parts: Sequence[Tensor], *, owner: int | None = None, order: Order | None = None, label: str = ""
    ) -> Work:
        """Start summing all ranks' `parts` into `out`, on every rank or, where `owner` is given, on that rank alone.

        Collective. `parts` have the shape and dtype of `out`, `out` may be one of them, and ranks may bring any number of
        them, also none. After `wait` the parts (and a non-owner's `out`) hold nothing of use. With `order`, the same on all
        ranks and naming every part once, the sum has the same bits on any transport; without it, any order.
        `label` says in words what is summed; ranks that differ in it are told apart where the shapes are alike.

        Raises:
            UsageError: A part differs from `out`, `owner` is no rank, or `order` does not name every part once.
        """

    @abstractmethod
    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order, on every rank, as tensors of its own. Collective.

        Shapes and dtypes may differ; the results are on the device of this rank's `tensor`.
        """

    @abstractmethod
    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Copy the source's tensor into every rank's `tensor` of the same shape and dtype. Collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it. Collective."""

    @abstractmethod
    def fail(self, failure: Failure) -> None:
        """Announce this rank's failure: whatever any other rank waits for, now or later, raises `PeerError` within seconds.

        The first failure that is announced is the one that every rank reports. Not collective; never blocks for long.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds. Every rank calls it once, in any order; nothing can be sent afterwards."""

    def all_reduce_(self, tensor: Tensor, *, label: str = "") -> Work:
        """Start replacing `tensor` by its sum over all ranks. Collective."""
        return self.sum_(tensor, [tensor], label=label)

    def reduce_(self, tensor: Tensor, owner: int, *, label: str = "") -> Work:
        """Start replacing the owner's `tensor` by the sum over all ranks; the others' hold nothing of use then. Collective."""
        return self.sum_(tensor, [tensor], owner=owner, label=label)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable value, in rank order, on every rank. Collective."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return [pickle.loads(part.numpy().tobytes()) for part in self.gather(data)]
