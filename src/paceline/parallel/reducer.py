"""Gradients averaged over ranks within the backward of an ordinary loop: nobody says when it begins, or that it has ended.

A backward announces itself by the first output of the wrapper, or the first parameter, that it reaches; autograd calls back at its
end. Every rank sends the same buckets in the same order, whatever its own backward reached.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import DeadlineError, PacelineError, PeerError, UsageError
from paceline.parallel.buckets import Bucket
from paceline.parallel.participants import Participants
from paceline.transport.base import Transport
from paceline.worker.flat import buckets_of

NO_TASK = -1  # what torch calls the backward where there is none


class Reducer:
    """Keeps `grad` of a module's parameters averaged over the ranks of a transport.

    Args:
        named: returns the parameters that the module has now, by name.
        transport: reaches the other ranks; their parameters have the same names, shapes and order.
        bucket_bytes: gradients leave in lots of this size.
        after: is called on every rank once the gradients of a backward are averaged, with the ranks that took part.
    """

    def __init__(
        self,
        named: Callable[[], Mapping[str, nn.Parameter]],
        transport: Transport,
        bucket_bytes: int,
        after: Callable[[Sequence[int]], None],
    ) -> None:
        self.transport, self.synchronise = transport, True
        self.participants = Participants(transport)
        self._named, self._bucket_bytes, self._after = named, bucket_bytes, after
        self._names: dict[int, str] = {}
        self._hooks: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}
        self._signature: list[Any] = []
        self._buckets: list[Bucket] = []
        self._place: dict[int, tuple[Bucket, int]] = {}
        self._dirty: set[int] = set()  # parameters with gradients that other ranks have not heard of
        self._arrivals: list[int] = []
        self._task: int | None = None
        self._number = self._next = 0
        self._learnt, self._overlap = False, True
        self._counting = False
        self.arrange()

    def arrange(self) -> None:
        """Follow what the user did with the parameters: frozen, unfrozen, replaced, moved."""
        named = self._named()
        trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        signature = [(id(p), p.shape, p.stride(), p.dtype, p.device) for p in trainable.values()]
        if signature == self._signature:
            return
        self._names = {id(parameter): name for name, parameter in trainable.items()}
        for key in [key for key in self._hooks if key not in self._names]:
            self._hooks.pop(key)[1].remove()
        for key, parameter in zip(self._names, trainable.values(), strict=True):
            if key not in self._hooks:
                self._hooks[key] = (parameter, _hook(parameter, self))
        self._signature, self._learnt = signature, False
        self._cut(list(reversed(trainable.values())))

    def _cut(self, parameters: list[nn.Parameter]) -> None:
        self._buckets = [Bucket(bucket) for bucket in buckets_of(parameters, self._bucket_bytes)]
        self._place = {id(p): (bucket, k) for bucket in self._buckets for k, p in enumerate(bucket.parameters)}

    def unhook(self) -> None:
        """Take the hooks off the user's parameters."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks, self._signature = {}, []

    def watch(self, output: Tensor) -> None:
        """Have backwards that run through an output of the module announce themselves."""
        leads_to_parameters = self._leads_to_parameters(output)
        output.register_hook(lambda gradient: self._reach(leads_to_parameters))  # type: ignore[no-untyped-call]

    def _leads_to_parameters(self, output: Tensor) -> bool:
        """Say whether an output depends on a parameter; the search mostly ends at the last layer's."""
        open_: list[Any] = [output.grad_fn]
        seen = set(open_)
        while open_:
            node = open_.pop()
            if id(getattr(node, "variable", None)) in self._hooks:
                return True
            following = [after for after, _ in node.next_functions if after is not None and after not in seen]
            seen.update(following)
            open_ += following
        return False

    def _reach(self, leads_to_parameters: bool) -> None:
        """Take part even where a backward leads to no parameter; not where only gradients of inputs are asked for."""
        if not self.synchronise or self._task is not None:
            return
        edge, runs = torch.autograd.graph.get_gradient_edge, torch._C._will_engine_execute_node
        try:
            if leads_to_parameters and not any(runs(edge(p).node) for p, _ in self._hooks.values() if p.requires_grad):
                return
        except RuntimeError as error:  # how torch says that the engine runs for autograd.grad over such a parameter
            raise UsageError(
                "torch.autograd.grad over parameters returns this rank's gradients alone, which nobody averages; "
                "call loss.backward(), or differentiate through the bare module, model.module, on purpose"
            ) from error
        self.begin()

    def arrive(self, parameter: nn.Parameter) -> None:
        """Take a parameter's gradient: this backward has added its last bit to it."""
        self._dirty.add(id(parameter))
        if self.participants.window_open and not self._counting:
            raise UsageError(
                "loss.backward() after model.backward(loss, count=...) within one accumulation: gradients with and without a count "
                "cannot be averaged together; use model.backward(loss, count=...) for all"
            )
        if not self.synchronise:
            return
        self.begin()
        place = self._place.get(id(parameter))
        if place is None:
            return
        bucket, k = place
        if bucket.work is not None:
            raise PacelineError(
                f"the gradient of {self._names[id(parameter)]!r} arrived again after its bucket had left; this backward uses it "
                "more often than the first one did. Use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.take(k, self._names[id(parameter)])
        self._arrivals.append(id(parameter))
        if self._learnt and self._overlap:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._send()

    def begin(self) -> None:
        """Start the averaging that belongs to the backward that runs now, unless it has started."""
        if self._task is not None:
            return
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True asks for derivatives of averaged gradients, which DistributedDataParallel does not have; "
                "differentiate twice through torch.autograd.grad over inputs, or leave create_graph out"
            )
        self._prepare(torch._C._current_graph_task_id())
        if not self.participants.settled:
            with self._hints():
                self.participants.settle(None)
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _prepare(self, task: int) -> None:
        self.arrange()
        self._number += 1
        self._next, self._arrivals, self._task = 0, [], task
        for bucket in self._buckets:
            bucket.begin()

    def abandon(self) -> None:
        """Forget a backward that failed half-way, now that another forward begins."""
        if self._task is None or torch._C._current_graph_task_id() != NO_TASK:
            return
        sent, self._task = self._next, None
        self.participants.settled = False
        if sent:
            raise UsageError(
                f"an earlier backward failed on rank {self.transport.rank} after {sent} of {len(self._buckets)} buckets had "
                "been sent, and the other ranks wait for the rest; let the exception end the program"
            )

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        label = f"gradients of backward {self._number}, bucket {self._next} of {len(self._buckets)}"
        names = [self._names[id(parameter)] for parameter in bucket.parameters]
        with self._hints():
            bucket.send(self.transport, self._dirty, names, active=self.participants.active, label=label)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """Send what has not left, and leave the averages in `grad`. Called by autograd at the end of the backward."""
        try:
            with self._hints():
                while self._next < len(self._buckets):
                    self._send()
                for bucket in self._buckets:
                    bucket.finish(self.participants.divisor, self.transport.size)
                self._after(self.participants.ranks)
                if not self._learnt:
                    self._learn()
        finally:
            self._task = None
            self.participants.close()
        self._dirty.clear()

    def _learn(self) -> None:
        """Cut the buckets again, by the order in which gradients arrived on the first rank that had any."""
        index = {key: k for k, key in enumerate(self._names)}
        mine = [index[key] for key in self._arrivals]
        heard = self.transport.gather_objects((mine, len(mine) != len(set(mine))))
        order = list(dict.fromkeys(next((arrivals for arrivals, _ in heard if arrivals), [])))
        rest = [k for k in reversed(range(len(index))) if k not in set(order)]
        parameters = [parameter for parameter, _ in self._hooks.values()]
        by_id = {id(parameter): parameter for parameter in parameters}
        keys = list(index)
        self._cut([by_id[keys[k]] for k in [*order, *rest]])
        self._overlap = not any(repeated for _, repeated in heard)
        self._learnt = True

    def backward(self, loss: Tensor, count: float) -> None:
        """Run the backward of a mean over `count` entries, which counts for as much in the mean over those of all ranks."""
        if loss.ndim or not (math.isfinite(count) and count >= 0):
            raise UsageError(
                f"backward was given a loss of shape {list(loss.shape)}, count={count!r}; give a scalar, a number >= 0"
            )
        participants = self.participants
        participants.check_window((p.grad is not None for p, _ in self._hooks.values()), self.synchronise)
        if not self.synchronise:
            weight = participants.accumulate(count)
        else:
            with self._hints():
                weight = participants.settle(count)
        self._counting = True
        try:
            if count:
                torch.autograd.backward(loss, torch.full_like(loss, weight))
            elif self.synchronise:  # a mean over nothing is NaN, and has no part; the other ranks have
                self._prepare(NO_TASK)
                self._finish()
        finally:
            self._counting = False

    def answer(self) -> None:
        """Take part in one backward of ranks that have more batches, bringing nothing."""
        self._prepare(NO_TASK)
        self._finish()

    @contextlib.contextmanager
    def _hints(self) -> Iterator[None]:
        try:
            yield
        except (DeadlineError, PeerError) as error:
            hinted = getattr(error, "__notes__", [])
            if (
                not self.participants.joined
                and not hinted
                and (isinstance(error, DeadlineError) or error.failure.error == "WorkerLeft")
            ):
                error.add_note(
                    "did a rank take fewer batches than the others, or no backward at all? Wrap the loop in `with model.join():`, "
                    "and let no_sync() be entered on all ranks alike"
                )
            raise


def _hook(parameter: nn.Parameter, reducer: Reducer) -> RemovableHandle:
    """Have the reducer told of the parameter's gradients; the user's parameters do not keep it alive."""
    reference = weakref.ref(reducer)

    def arrive(arrived: nn.Parameter) -> None:
        found = reference()
        if found is not None:
            found.arrive(arrived)

    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
    return register(arrive)
