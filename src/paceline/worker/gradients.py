"""From autograd's hands to the owner's: gradients summed over micro-batches and workers.

LocalGradients      one worker: they stay where autograd puts them
BucketedGradients   several workers: into flat buckets, which leave as they fill in the last micro-batch's backward
OrderedGradients    any number of workers, same bits for any: partial sums in the tree's order (see sum_tree)
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import PacelineError, UsageError
from paceline.transport.base import Transport, Work
from paceline.worker.flat import FlatLayout, buckets_of
from paceline.worker.sum_tree import PartialSums, sum_order

BUCKET_BYTES = 25 * 2**20


class Gradients(ABC):
    """The gradients of the parameters of the loss called `name` on one worker, over one step at a time.

    `owner` is the only rank that gets the sums, or None where every rank does. Collective: every rank goes through the same steps.
    """

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter], transport: Transport, owner: int | None) -> None:
        self._name = name
        self._all = dict(parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._transport, self._owner = transport, owner
        self._owned = owner is None or owner == transport.rank
        self._trainable: list[nn.Parameter] = []
        self._hooks: list[RemovableHandle] = []
        self._thread: int | None = None

    def begin(self, runs: Sequence[Sequence[int]]) -> None:
        """Start a step; `runs` are the micro-batches that each rank works on.

        Parameters may have been frozen or freed since the last step.
        """
        self.unhook()  # of a step that failed
        for parameter in self._all.values():
            parameter.grad = None
        trainable = [parameter for parameter in self._all.values() if parameter.requires_grad]
        if [id(p) for p in trainable] != [id(p) for p in self._trainable]:
            self._trainable = trainable
            self._arrange()
        if self._transport.size > 1:
            on_cpu = all(parameter.device.type == "cpu" for parameter in trainable)  # GPUs have backward threads of their own
            self._thread = threading.get_ident() if on_cpu and self._transport.name == "threads" else None
            self._hooks = [_hook(parameter, self._arrive) for parameter in trainable]
        self._start(runs)

    def _arrive(self, parameter: Tensor) -> None:
        """Called by autograd when a backward has added its last bit to the parameter's gradient."""
        if self._thread is not None and threading.get_ident() != self._thread:
            raise UsageError(
                f"a worker's backward reached the parameter {self._names.get(id(parameter), '?')!r} of another worker; "
                "compute the loss from the model that is passed to it, loss(model, batch), not from one outside"
            )

    def unhook(self) -> None:
        """Take the hooks off again: outside of a step nothing hangs on the user's parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @abstractmethod
    def _arrange(self) -> None:
        """Lay out storage for the parameters that are trainable now."""

    @abstractmethod
    def _start(self, runs: Sequence[Sequence[int]]) -> None:
        """Start a step."""

    @abstractmethod
    def before_backward(self, micro_batch: int, last: bool) -> None:
        """Get ready for a micro-batch's backward; `last` says that it is this rank's last in the step."""

    @abstractmethod
    def after_backward(self, micro_batch: int) -> None:
        """Take what the micro-batch's backward left."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the sum in every owned parameter's `grad`; None where no micro-batch of any worker used it."""

    def _check_dense(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {self._names[id(parameter)]!r} is {parameter.grad.layout}, and workers sum dense gradients; "
                "build the module with sparse=False"
            )
        return parameter.grad


class LocalGradients(Gradients):
    """One worker: autograd accumulates over the micro-batches, nothing is copied."""

    def _arrange(self) -> None: ...

    def _start(self, runs: Sequence[Sequence[int]]) -> None: ...

    def before_backward(self, micro_batch: int, last: bool) -> None: ...

    def after_backward(self, micro_batch: int) -> None: ...

    def finish(self) -> None: ...


class _Bucket:
    """A flat tensor on its way: what has arrived in it, and whether it has left."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = FlatLayout(parameters)
        self.flat = self.layout.new()
        self.views = self.layout.views(self.flat)
        self.arrived = [False] * len(parameters)
        self.done = [False] * len(parameters)
        self.missing = len(parameters)
        self.work: Work | None = None

    def reset(self) -> None:
        self.arrived = [False] * len(self.arrived)
        self.done = [False] * len(self.arrived)
        self.missing = len(self.arrived)
        self.work = None

    def seal(self) -> None:
        """Make the flat tensor say what has arrived and what has not."""
        for view, arrived in zip(self.views, self.arrived, strict=True):
            if not arrived:
                view.zero_()
        flags = self.layout.flags(self.flat)
        if all(self.arrived):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(self.arrived, dtype=flags.dtype))


class BucketedGradients(Gradients):
    """Several workers: each gradient is copied into its bucket once, where autograd then adds the later micro-batches.

    A bucket leaves when all its gradients have arrived in the last micro-batch's backward, after the buckets before it, so that all
    ranks send in one order. The first step sends everything at its end and learns the order of arrival on rank 0, by which the
    buckets are then cut. Where a gradient arrives more than once in a backward (reentrant recomputation), nothing leaves early.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], transport: Transport, owner: int | None, *, overlap: bool = True
    ) -> None:
        super().__init__(name, parameters, transport, owner)
        self._overlap = overlap
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, int]] = {}
        self._learnt = False
        self._arrivals: list[int] = []
        self._last = False
        self._next = 0

    def _arrange(self) -> None:
        self._learnt = False
        self._cut(list(reversed(self._trainable)))

    def _cut(self, parameters: list[nn.Parameter]) -> None:
        self._buckets = [_Bucket(bucket) for bucket in buckets_of(parameters, BUCKET_BYTES)]
        self._place = {id(p): (bucket, k) for bucket in self._buckets for k, p in enumerate(bucket.layout.parameters)}

    def _start(self, runs: Sequence[Sequence[int]]) -> None:
        self._arrivals, self._last, self._next = [], False, 0
        for bucket in self._buckets:
            bucket.reset()

    def before_backward(self, micro_batch: int, last: bool) -> None:
        self._last = last

    def _arrive(self, parameter: Tensor) -> None:
        super()._arrive(parameter)
        with torch._C.DisableTorchFunction():  # a mode that watches for draws has nothing to see here
            self._take(parameter)

    def _take(self, parameter: Tensor) -> None:
        place = self._place.get(id(parameter))
        if place is None or not isinstance(parameter, nn.Parameter):
            return
        bucket, k = place
        if bucket.work is not None:
            raise PacelineError(
                f"the gradient of {self._names[id(parameter)]!r} arrived again after its bucket had left; "
                "a later step uses it more often than the first one did. Use torch.utils.checkpoint with use_reentrant=False"
            )
        if parameter.grad is not bucket.views[k]:
            bucket.views[k].copy_(self._check_dense(parameter))
            parameter.grad = bucket.views[k]
            bucket.arrived[k] = True
        if self._last:
            self._arrivals.append(id(parameter))
            if not bucket.done[k]:
                bucket.done[k] = True
                bucket.missing -= 1
            if self._learnt and self._overlap and not bucket.missing:
                self._send_full()

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        bucket.seal()
        label = f"gradients of {self._name}, bucket {self._next}"
        bucket.work = self._transport.sum_(bucket.flat, [bucket.flat], owner=self._owner, label=label)
        self._next += 1

    def after_backward(self, micro_batch: int) -> None: ...

    def finish(self) -> None:
        while self._next < len(self._buckets):
            self._send()
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()
            _hand_out(bucket.layout, bucket.flat, bucket.views, self._owned, everywhere=all(bucket.arrived))
        self.unhook()  # not before all ranks are through their backwards, one of which may stray to these parameters
        if not self._learnt:
            self._learn()

    def _learn(self) -> None:
        """Cut the buckets again by the order of arrival, keeping this step's sums where the parameters' `grad` points."""
        index = {id(parameter): k for k, parameter in enumerate(self._trainable)}
        mine = [index[arrival] for arrival in self._arrivals]
        order = list(dict.fromkeys(self._transport.gather_objects(mine)[0]))
        repeated = len(self._arrivals) != len(set(self._arrivals))
        anyone_repeats = any(self._transport.gather_objects(repeated))
        unused = sorted(set(range(len(self._trainable))) - set(order))
        self._cut([self._trainable[k] for k in [*order, *unused]])
        self._overlap = self._overlap and not anyone_repeats
        self._learnt = True


class OrderedGradients(Gradients):
    """Any number of workers with the same bits: each micro-batch's gradients are a leaf of the tree that sum_tree describes."""

    def _arrange(self) -> None:
        self._layouts = [FlatLayout(bucket) for bucket in buckets_of(self._trainable)]
        self._pool: list[list[Tensor]] = []
        self._sums: PartialSums[list[Tensor]] = PartialSums(self._add)
        self._out: list[Tensor] | None = None

    def _start(self, runs: Sequence[Sequence[int]]) -> None:
        self._order = sum_order(runs)
        self._sums = PartialSums(self._add)
        if self._out is not None:
            self._pool.append(self._out)
            self._out = None

    def _new(self) -> list[Tensor]:
        return self._pool.pop() if self._pool else [layout.new() for layout in self._layouts]

    def _add(self, into: list[Tensor], other: list[Tensor]) -> list[Tensor]:
        torch._foreach_add_(into, other)
        self._pool.append(other)
        return into

    def before_backward(self, micro_batch: int, last: bool) -> None:
        for parameter in self._trainable:
            parameter.grad = None

    def after_backward(self, micro_batch: int) -> None:
        flats = self._new()
        for layout, flat in zip(self._layouts, flats, strict=True):
            views = layout.views(flat)
            used = [parameter.grad is not None for parameter in layout.parameters]
            if not all(used):
                flat.zero_()
            arrived = [(view, self._check_dense(p)) for view, p, here in zip(views, layout.parameters, used, strict=True) if here]
            if arrived:
                torch._foreach_copy_([view for view, _ in arrived], [gradient for _, gradient in arrived])
            layout.flags(flat).copy_(torch.tensor(used, dtype=layout.dtype))
        self._sums.push(micro_batch, flats)

    def finish(self) -> None:
        values = self._sums.values
        self._out = out = values[0] if values else self._new()
        if self._order is not None:
            works = [
                self._transport.sum_(
                    out[g],
                    [value[g] for value in values],
                    owner=self._owner,
                    order=self._order,
                    label=f"gradients of {self._name}, part {g}",
                )
                for g in range(len(self._layouts))
            ]
            for work in works:
                work.wait()
        self.unhook()
        for layout, flat in zip(self._layouts, out, strict=True):
            _hand_out(layout, flat, layout.views(flat), self._owned, everywhere=False)
        self._pool.extend(values[1:])


def _hook(parameter: nn.Parameter, arrive: Callable[[Tensor], None]) -> RemovableHandle:
    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(arrive)


def _hand_out(layout: FlatLayout, flat: Tensor, views: Sequence[Tensor], owned: bool, *, everywhere: bool) -> None:
    """Point each parameter's `grad` at its sum, or at nothing where this rank does not own it or nobody used it."""
    if not owned:
        used = [False] * len(views)
    elif everywhere:  # used here already, so no need to read the flags, which would wait for a GPU
        used = [True] * len(views)
    else:
        used = [abs(flag) > 0 for flag in layout.flags(flat).tolist()]  # complex gradients have complex flags
    for parameter, view, is_used in zip(layout.parameters, views, used, strict=True):
        parameter.grad = view if is_used else None
