"""One worker: carries out a step on its micro-batches, side by side with the others. Every rank calls every method."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.contents import find_value, to_device
from paceline.errors import Failure, MismatchError, PeerError, UsageError
from paceline.job import Job
from paceline.layout import Layout
from paceline.random_streams import stream_seed
from paceline.trace import Span
from paceline.transport.base import Transport
from paceline.worker.losses import LossValue
from paceline.worker.masks import ProcessMasks, ThreadMasks
from paceline.worker.module_state import ModuleState
from paceline.worker.objective import Objective
from paceline.worker.replica import unit_of
from paceline.worker.sync_batchnorm import SyncBatchNormMode

IGNORE_INDEX = -100  # what torch's cross_entropy and Hugging Face's models leave out of a mean


@dataclass(frozen=True)
class Share:
    """This worker's part of a global batch: rows of every micro-batch, and the micro-batches that lie here."""

    sizes: tuple[int, ...]
    micro_batches: Mapping[int, Any]
    digest: int | None = None
    place: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a loss came to over the global batch, the same on every rank; tensors, since reading them would wait for a GPU."""

    loss: float | Tensor
    count: float | Tensor
    lr: float | None
    grad_norm: float | Tensor | None
    extras: dict[str, float | Tensor] = field(default_factory=dict)
    stop: bool = False

    def read_loss(self) -> float:
        """Return the loss as a number; waits for a GPU."""
        return float(self.loss)


@dataclass(frozen=True)
class Evaluated:
    """What one micro-batch came to in an evaluation: loss total and count, and what metrics and predict see."""

    rows: int
    total: float | None
    count: float
    outputs: Any = None
    targets: Any = None


class Worker:
    """One rank with one device and its own module tree."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        objectives: Sequence[Objective],
        transport: Transport,
        layout: Layout,
        device: torch.device,
        *,
        masks: ThreadMasks | ProcessMasks,
        shared_weights: bool,
        traced: bool,
    ) -> None:
        self.job, self.model, self.objectives = job, model, list(objectives)
        self.transport, self.device = transport, device
        self.rank = transport.rank
        self.spans: list[Span] | None = [] if traced else None
        self._runs, self._mine = layout.micro_batches, layout.micro_batches_of(self.rank)
        self._masks, self._shared_weights = masks, shared_weights
        self._num_parameters = sum(1 for _ in model.parameters())
        self._state = ModuleState(model, job.buffers, transport, global_norms=job.sync_batchnorm and transport.size > 1)
        self._sync = SyncBatchNormMode(transport) if job.sync_batchnorm and transport.size > 1 else contextlib.nullcontext()
        self.stop_requested = False
        self.steps_done = 0
        self._step: int | None = None
        self._micro_batch: int | None = None
        self._doing = ""

    def step(self, share: Share, number: int, total_steps: int | None) -> dict[str, Outcome]:
        """Take one optimizer step on a global batch, each loss in turn, and return what each came to. Collective."""
        with self._guard(step=number):
            self.schedule(total_steps)
            outcomes = {objective.name: self._take(objective, share, number) for objective in self.objectives}
            if self.job.scheduler_every == "step":
                for objective in self.objectives:
                    objective.advance(outcomes[objective.name].read_loss)
        self.steps_done = number
        return outcomes

    def _take(self, objective: Objective, share: Share, number: int) -> Outcome:
        if self.job.sync_batchnorm and 0 in share.sizes:
            raise UsageError(f"sync_batchnorm needs rows on every replica, got {share.sizes} per micro-batch; pass drop_last=True")
        objective.gradients.begin([[i for i in run if share.sizes[i]] for run in self._runs])
        self._state.begin()
        values: dict[int, LossValue] = {}
        mine = [i for i in self._mine if share.sizes[i]]
        try:
            for i in mine:
                self._micro_batch = i
                seed = stream_seed("forward", self.job.seed, number, objective.name, i)
                with self._masks.use(seed, self.device):
                    values[i] = self._forward(objective, share, i)
                    self._backward(objective, values[i], share, i, last=i == mine[-1])
            self._micro_batch = None
            with self._timed("reduce"):
                objective.gradients.finish()
                agreed = self._exchange(objective, share, number, values)
                self._state.finish()
        except BaseException:
            objective.gradients.unhook()
            self._state.restore()
            raise
        return self._update(objective, share, agreed)

    def _forward(self, objective: Objective, share: Share, i: int) -> LossValue:
        with self._timed("forward", i):
            self._state.before_forward()
            batch = share.micro_batches[i]
            count = None if self.job.count is None else float(self.job.count(batch))
            with self._sync:
                result = objective.loss(self.model, to_device(batch, self.device, non_blocking=True))
        value = LossValue.read(result, share.sizes[i], count, objective.name)
        _check_count(value, batch)
        if not torch.is_grad_enabled():
            raise UsageError("gradients are off, so there is nothing to learn from; call step outside of torch.no_grad()")
        if not value.value.requires_grad:
            raise UsageError(
                f"the {objective.name} does not depend on a parameter that requires a gradient; "
                "unfreeze one (requires_grad_(True)), and compute the loss from the model that is passed to it"
            )
        return value

    def _backward(self, objective: Objective, value: LossValue, share: Share, i: int, *, last: bool) -> None:
        with self._timed("backward", i):
            objective.gradients.before_backward(i, last)
            if isinstance(value.count, Tensor) or value.count or value.is_sum:  # a mean over nothing is NaN and has no part
                denominator = sum(share.sizes) if value.by_rows else _nominal(share.sizes)
                weight = (1.0 if value.is_sum else value.count) / denominator
                seed = torch.ones_like(value.value) * weight
                # Gradients for parameters that this loss does not train would be computed, and pile up, for nothing.
                partial = len(objective.parameters) < self._num_parameters
                inputs = [p for p in objective.parameters.values() if p.requires_grad] if partial else None
                self._masks.backward(value.value, seed.to(value.value.dtype), inputs)
            objective.gradients.after_backward(i)
            self._state.after_backward(i)

    def _exchange(self, objective: Objective, share: Share, number: int, values: Mapping[int, LossValue]) -> _Agreed:
        """Return what all ranks' micro-batches came to, in order; ranks at another step or with another batch are found before."""
        local = _Local(
            number, objective.name, share.digest, share.sizes, share.place,
            sorted({name for value in values.values() for name in value.extras}),
            sorted({value.by_rows for value in values.values()}),
            self._state.changed(), self._state.changed_attributes(), self.stop_requested,
        )  # fmt: skip
        gathered: list[_Local] = self.transport.gather_objects(local)
        self._masks.check()  # all ranks have drawn
        for rank, other in enumerate(gathered):
            _check_same_batch(local, other, self.rank, rank)
        names = sorted({name for other in gathered for name in other.extras})
        kinds = {kind for other in gathered for kind in other.kinds}
        if len(kinds) > 1 or any(other.kinds and other.extras != names for other in gathered):
            raise UsageError(f"the {objective.name} returned different forms for micro-batches; return one, with the same extras")
        self._state.check(sorted({name for other in gathered for name in other.changed}), [other.attributes for other in gathered])
        rows = [values[i].numbers() for i in sorted(values)]
        stacked = torch.stack(rows) if rows else torch.zeros(0, 2 + len(names), dtype=torch.float64, device=self.device)
        numbers = torch.cat(self.transport.gather(stacked))
        return _Agreed(numbers, names, kinds == {True}, any(other.stop for other in gathered))

    def _update(self, objective: Objective, share: Share, agreed: _Agreed) -> Outcome:
        totals = agreed.numbers.sum(0)
        if totals.device.type == "cpu" and not float(totals[1]):
            raise UsageError(f"the count of the whole batch is 0: the {objective.name} is a mean over nothing; leave it out")
        factor: float | Tensor = 1.0
        if not agreed.by_rows:  # backward started before the count was known
            factor = _nominal(share.sizes) / totals[1]
            factor = float(factor) if factor.device.type == "cpu" else factor
        lr, norm = objective.lr, None
        with self._timed("update"):
            if objective.optimizer is not None:
                norm = objective.update(factor, self.job.clip_norm)
            if self._shared_weights:  # nobody goes on before the owner has written
                self.transport.barrier()
        loss = totals[0] / totals[1]
        extras: dict[str, float | Tensor] = {name: totals[2 + k] / totals[1] for k, name in enumerate(agreed.names)}
        return Outcome(loss, totals[1], lr, norm, extras, agreed.stop)

    def schedule(self, total_steps: int | None) -> None:
        """Make the schedulers that the job asks for, where this worker updates. Called before every step, effective once."""
        for objective in self.objectives:
            make = self.job.scheduler_of(objective.name)
            if make is not None:
                objective.schedule(make, total_steps)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the module tree into evaluation mode, and every module back into the mode it had."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    @torch.no_grad()
    def evaluate(
        self, share: Share, number: int, *, with_loss: bool, predict: Callable[..., Any] | None, target: Callable[..., Any] | None
    ) -> dict[int, Evaluated]:
        """Return what each of this worker's micro-batches comes to, without gradients. Not collective."""
        results: dict[int, Evaluated] = {}
        with self._guard(doing="evaluation"), self.evaluating():
            for i, host_batch in sorted(share.micro_batches.items()):
                self._micro_batch = i
                if i not in self._mine:
                    continue
                batch = to_device(host_batch, self.device)
                total, count = None, float(share.sizes[i])
                with self._masks.use(stream_seed("evaluate", self.job.seed, number, i), self.device):
                    if with_loss:
                        name, loss = next(iter(self.job.losses.items()))
                        known = None if self.job.count is None else float(self.job.count(host_batch))
                        value = LossValue.read(loss(self.model, batch), share.sizes[i], known, name)
                        _check_count(value, host_batch)
                        total, count = float(value.total), float(value.count)
                    outputs = None if predict is None else to_device(predict(self.model, batch), "cpu")
                results[i] = Evaluated(share.sizes[i], total, count, outputs, None if target is None else target(host_batch))
        return results

    @contextlib.contextmanager
    def _guard(self, step: int | None = None, doing: str = "") -> Iterator[None]:
        """Tell the other workers of whatever fails inside, and note on the exception where it happened."""
        self._step, self._doing, self._micro_batch = step, doing, None
        try:
            yield
        except BaseException as error:
            unit = unit_of(error, self.model)
            doing = self._doing + (f" of {unit}" if unit else "")
            failure = Failure.of(error, rank=self.rank, step=self._step, micro_batch=self._micro_batch, doing=doing)
            if failure.rank == self.rank and not isinstance(error, PeerError):
                error.add_note(failure.where)
                if self.transport.size > 1:  # a worker that is alone can go on after a failure
                    self.transport.fail(failure)
            raise
        finally:
            self._step, self._micro_batch, self._doing = None, None, ""

    @contextlib.contextmanager
    def _timed(self, action: str, micro_batch: int | None = None) -> Iterator[None]:
        self._doing = action
        if self.spans is None:
            yield
            return
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.spans.append(Span(self.rank, action, start, time.perf_counter(), micro_batch))


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know after a loss: (total, count, extras) of every micro-batch, whether counts are rows, whether to stop."""

    numbers: Tensor
    names: list[str]
    by_rows: bool
    stop: bool


@dataclass(frozen=True)
class _Local:
    """What ranks compare before they believe each other's numbers."""

    number: int
    objective: str
    digest: int | None
    sizes: tuple[int, ...]
    place: tuple[Any, ...]
    extras: list[str]
    kinds: list[bool]
    changed: list[str]
    attributes: dict[str, Any]
    stop: bool


def _check_same_batch(mine: _Local, theirs: _Local, my_rank: int, their_rank: int) -> None:
    if (mine.number, mine.objective) != (theirs.number, theirs.objective):
        raise MismatchError(
            f"rank {my_rank} is at step {mine.number} ({mine.objective}), rank {their_rank} at step {theirs.number} "
            f"({theirs.objective}); every rank must take every step"
        )
    if mine.place != theirs.place:
        raise MismatchError(
            f"step {mine.number}: rank {my_rank} is at {_place(mine)}, rank {their_rank} at {_place(theirs)}; every rank must have "
            "the same data, whole, and take every batch of it"
        )
    if mine.digest != theirs.digest or mine.sizes != theirs.sizes:
        raise MismatchError(
            f"step {mine.number}: rank {my_rank} was given another batch ({sum(mine.sizes)} rows) than rank {their_rank} "
            f"({sum(theirs.sizes)} rows); step() takes the whole global batch on every rank, the same one. "
            "Use trainer.batches(), or drop the DistributedSampler"
        )


def _place(local: _Local) -> str:
    epoch, batch, length = local.place
    return f"batch {batch} of epoch {epoch}" + ("" if length is None else f", which has {length} batches")


def _check_count(value: LossValue, batch: Any) -> None:
    """Raise `UsageError` where a mean over rows has left some labels out: a mean of means would weigh the others wrongly."""
    ignored = find_value(batch, IGNORE_INDEX) if value.by_rows else None
    if ignored is not None:
        raise UsageError(
            f"{ignored or 'the batch'} holds {IGNORE_INDEX}, the index that losses ignore, and the loss is a mean without a count: "
            "micro-batches with fewer labels would weigh too much. "
            "Pass Job(count=count_valid(...)), or return (sum, count) from the loss"
        )


def _nominal(sizes: Sequence[int]) -> float:
    """Return the power of two by which gradients are scaled while the real count is not known: exact to take back."""
    return float(1 << (sum(sizes).bit_length() - 1))
