"""Data parallelism over processes: each has the whole module, its own rows, and everyone's averaged gradients."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.tree import map_leaves
from paceline.errors import Failure, PeerError, UsageError
from paceline.job import BufferRule
from paceline.parallel.reducer import Reducer
from paceline.parallel.shared_buffers import SharedBuffers
from paceline.parallel.wrapper import Wrapper
from paceline.transport.base import Transport
from paceline.transport.environment import Environment
from paceline.transport.threads import ThreadsTransport
from paceline.transport.torch_distributed import TorchDistributedTransport
from paceline.worker.gradients import BUCKET_BYTES
from paceline.worker.replica import check_initialised
from paceline.worker.same_model import check_same_model


class Stateful(Protocol):
    """An optimizer, a scheduler: what has a state that can be taken and put back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class DistributedDataParallel(Wrapper):
    """Averages the gradients of `module` over the processes of a run, within `loss.backward()`.

    Every process that torchrun, Slurm or the like started makes one, over the same module; its parameters and buffers then
    become rank 0's, as with torch's wrapper. An existing default process group is joined. In a process that stands alone nothing
    is exchanged, so a script runs unchanged without a launcher.

    - The gradient is the plain average of the ranks' gradients: that of a mean over equal numbers of rows. Where numbers differ,
      or labels are ignored, `backward(loss, count=n)` weights exactly.
    - Parameters that a rank, or every rank, does not use need no flag; `grad` of those that nobody used stays as it was. On every
      rank the loss must come from an output of the wrapper; taken through `model.module` it must reach a parameter.
    - Parameters may be frozen and unfrozen, on all ranks alike. Hooks on parameters see this rank's gradient; `grad` is the average
      once `backward` returns, so clipping norms are global. A `grad` that the program keeps is not overwritten.
    - BatchNorm's running statistics take in all ranks at every synchronised backward, in rank order. Other buffers that a forward
      changes must come out equal, or have a rule in `buffers`.
    - A copy (`copy.deepcopy`, pickle) holds the module without the connection: fit for evaluation, or to be wrapped again.

    Args:
        module: the module, on this rank's device; make its optimizer before or after.
        buffers: name of a buffer -> how to merge what the ranks left in it, as for a `Job`.
        bucket_bytes: gradients leave in lots of this size.
        timeout_s: longest wait for another rank, in seconds.
        transport: how ranks reach each other, where it is not to be found out.

    Raises:
        UsageError: no parameter requires a gradient.
        MismatchError: the ranks' modules differ in names, shapes, dtypes, order, or in what is frozen; it says where first.

    >>> model = DistributedDataParallel(nn.Linear(3, 1))
    >>> with model.no_sync():
    ...     model(torch.ones(2, 3)).mean().backward()
    >>> model(torch.ones(2, 3)).mean().backward()
    >>> model.weight.grad, list(model.state_dict())
    (tensor([[2., 2., 2.]]), ['weight', 'bias'])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        buffers: Mapping[str, BufferRule] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 600.0,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(module)
        check_initialised(module)
        _check_trainable(module)
        owned = transport is None
        end = transport or _find_transport(module, timeout_s)
        try:
            check_same_model(module, end, values=False)
            _spread(module, end, source=0)
            shared = SharedBuffers(module, dict(buffers or {}), end)
            self._reducer: Reducer | None = Reducer(functools.partial(_named, module), end, bucket_bytes, shared.exchange)
        except BaseException:
            if owned:
                end.close()
            raise
        self._shared: SharedBuffers | None = shared
        before = getattr(sys, "last_value", None)
        self._leave = weakref.finalize(self._reducer, _leave, end, owned, before)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self._connected.transport.rank == 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Nothing is exchanged before the backward."""
        reducer, shared = self._reducer, self._shared
        if reducer is None or shared is None:
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.module.parameters()):
                raise UsageError(
                    "this DistributedDataParallel is a copy, or closed, and reaches no other rank; evaluate it under "
                    "torch.no_grad(), or wrap its module again on every rank"
                )
            return self.module(*args, **kwargs)
        reducer.abandon()
        reducer.arrange()
        if self.training:
            shared.before_forward()
        try:
            output = self.module(*args, **kwargs)
        except Exception as error:
            if reducer.transport.size > 1:
                error.add_note(f"rank {reducer.transport.rank}, forward")
            raise
        if not torch.is_grad_enabled():
            return output
        return map_leaves(functools.partial(_watch, reducer), output)

    def backward(self, loss: Tensor, count: float | Tensor | None = None) -> None:
        """Run the loss's backward, weighted by how many entries it is the mean of.

        Gradients are those of the mean over all ranks' entries. Under `no_sync` the entries of all losses up to the next
        synchronised backward are taken together, and all of them must be given with their counts.

        Args:
            loss: a mean, as a scalar.
            count: number of entries that it is over, such as rows, or labels that are not ignored; without it this is
                `loss.backward()`.
        """
        if count is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._connected.backward(loss, float(count))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone.

        What counts is where `backward` is called; where the forward was does not matter. The next backward outside averages all
        that has accumulated. Every rank must enter and leave it alike.
        """
        reducer = self._connected
        before, reducer.synchronise = reducer.synchronise, False
        try:
            yield
        finally:
            reducer.synchronise = before

    @contextlib.contextmanager
    def join(self, *states: Stateful) -> Iterator[None]:
        """Let ranks take different numbers of batches in the loop inside.

        A rank that is done goes on answering the others until all are; gradients are averaged over the ranks that still have
        batches. At the end every rank gets the weights and buffers of a rank that went on to the last, and the state of each of
        `states`: give optimizers and schedulers, which would differ from then on.

        Raises:
            PeerError: another rank left its loop with an exception.
        """
        reducer = self._connected
        participants = reducer.participants
        participants.joined, participants.active = True, True
        rank, size = reducer.transport.rank, reducer.transport.size
        last = list(range(size))
        participants.ranks = last
        try:
            yield
            last = participants.ranks
            participants.active = False
            while True:
                participants.settle(None)
                if not participants.ranks:
                    break
                last = participants.ranks
                reducer.answer()
        except BaseException as error:
            if not isinstance(error, PeerError):
                reducer.transport.fail(Failure.of(error, rank=rank, doing="within join()"))
            raise
        finally:
            participants.joined, participants.active = False, True
            participants.ranks = list(range(size))
            participants.close()
        if len(last) < size:
            _spread(self.module, reducer.transport, source=last[0])
            for state in states:
                state.load_state_dict(reducer.transport.gather_objects(state.state_dict())[last[0]])
            if self._shared is not None:
                self._shared.remember()

    def close(self) -> None:
        """Take the hooks off the parameters and leave the group; the module goes on to be usable by itself."""
        if self._reducer is not None:
            self._reducer.unhook()
            self._reducer = self._shared = None
            self._leave()

    @property
    def _connected(self) -> Reducer:
        if self._reducer is None:
            raise UsageError("this DistributedDataParallel is a copy, or closed, and reaches no other rank; wrap its module again")
        return self._reducer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reducer": None, "_shared": None, "_leave": None}


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def _check_trainable(module: nn.Module) -> None:
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        has = f"all {len(parameters)} parameters of {type(module).__name__} are frozen" if parameters else "it has no parameters"
        raise UsageError(
            f"DistributedDataParallel was given a module with nothing to train: {has}; use the module itself, "
            "or unfreeze some with requires_grad_(True)"
        )
    meta = next((name for name, parameter in module.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise UsageError(f"the parameter {meta!r} is on the meta device and has no values; call module.to_empty(device=...) first")


def _find_transport(module: nn.Module, timeout_s: float) -> Transport:
    """Return this process's end of the run that it was started in; of a group of one where it stands alone."""
    environment = Environment.detect(os.environ)
    if not (dist.is_available() and dist.is_initialized()) and (environment is None or environment.size == 1):
        return ThreadsTransport.group(1, timeout_s=timeout_s)[0]
    device = next(module.parameters()).device
    return TorchDistributedTransport(timeout_s=timeout_s, device=device, environment=environment)


@torch.no_grad()
def _spread(module: nn.Module, transport: Transport, source: int) -> None:
    """Give every rank the parameters and buffers of one."""
    if transport.size > 1:
        for tensor in [*module.parameters(), *module.buffers()]:
            transport.broadcast_(tensor.data, source)


def _watch(reducer: Reducer, leaf: Any) -> Any:
    """Have a backward through an output announce itself; an output that no backward would run through is given one."""
    if not isinstance(leaf, Tensor) or (leaf.requires_grad and leaf.is_leaf):
        return leaf
    if not leaf.requires_grad:
        if not (leaf.is_floating_point() or leaf.is_complex()) or reducer.transport.size == 1:
            return leaf
        leaf = _Tie.apply(torch.zeros((), requires_grad=True), leaf)  # type: ignore[no-untyped-call]
    reducer.watch(leaf)
    return leaf


class _Tie(torch.autograd.Function):
    """Returns a copy of a tensor without gradients that requires one, so that a loss of it has a backward to take part in."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _leave(transport: Transport, owned: bool, before: object) -> None:
    """Leave the group; where an exception ends the program, tell the other ranks which."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and error is not before and not isinstance(error, PeerError):
        transport.fail(Failure.of(error, rank=transport.rank, doing="the program"))
    if owned:
        transport.close()
