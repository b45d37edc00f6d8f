"""The one place where the parts meet: a job and a plan in, a training run out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import nn

from paceline.assembly import Assembly, assemble
from paceline.data.contents import digest
from paceline.data.local import LocalBatch, cut
from paceline.data.order import Position
from paceline.data.source import Source
from paceline.errors import Failure, PeerError, UsageError
from paceline.evaluation import MetricFold, default_predict, default_target, in_order, join_outputs
from paceline.job import Job
from paceline.plan import Plan
from paceline.report.reports import EvaluationReport, Logger, StepReport
from paceline.trace import Trace
from paceline.transport.base import Transport
from paceline.worker.worker import Evaluated, Outcome, Share, Worker

T = TypeVar("T")


class Trainer:
    """Trains a job under a plan, with the losses, gradients and weights that one device would give.

    In a plain script the plan's workers are threads of this process. In a process that torchrun, Slurm or `paceline train` started
    it is one of the workers, and every process must make the same Trainer and call the same methods in the same order: all methods
    but the properties are collective. A trainer is a context manager; `close` puts back what it changed in the process.

    Args:
        job: what to train.
        plan: how, as a `Plan` or a line of text such as `replicas=2,micro_batches=4`.
        transport: `threads` or `processes`; None takes what fits how this process was started.
        devices: one device (`"cpu"`) for all workers, or a list with one for each worker thread; None takes GPUs if they suffice.
        timeout_s: longest wait for another worker, in seconds.
        total_steps: number of optimizer steps, for a scheduler that wants to know, where neither `batches` nor `fit` is told.
        trace: record when each worker did what.

    Raises:
        UsageError: the plan, the job and the workers do not fit.
        MismatchError: the processes do not hold the same model.

    >>> model = nn.Linear(2, 1)
    >>> job = Job(model=model, loss=lambda m, b: (m(b[0]) - b[1]).square().mean(), batch_size=4,
    ...           optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    ...           data=torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1)))
    >>> with Trainer(job, "replicas=2") as trainer:
    ...     for batch in trainer.batches(epochs=1):
    ...         report = trainer.step(batch)
    >>> report.step, report.rows, report.stepped
    (2, 4, True)
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | str | None = None,
        *,
        transport: str | None = None,
        devices: str | Sequence[str | torch.device] | None = None,
        timeout_s: float = 600.0,
        total_steps: int | None = None,
        trace: bool = False,
    ) -> None:
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise UsageError(f"timeout_s={timeout_s!r} is not a number of seconds above 0; every wait has an end")
        self.job = job
        threads_before = torch.get_num_threads()
        self._assembly = assemble(job, Plan.of(plan), transport=transport, devices=devices, timeout_s=timeout_s, traced=trace)
        self._close = weakref.finalize(self, _close, self._assembly, threads_before)
        self.plan, self.layout = self._assembly.plan, self._assembly.layout
        self.position = Position()
        self.steps_done = 0
        self.total_steps = total_steps
        self._source: Source | None = None
        self._epoch_loss: tuple[Any, Any] = (0.0, 0.0)

    @property
    def model(self) -> nn.Module:
        """The user's module, with the current weights."""
        return self._first.model

    @property
    def rank(self) -> int:
        """This process's rank; 0 where it runs all workers."""
        return self._first.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._first.transport.size

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes: true in exactly one."""
        return self.rank == 0

    @property
    def trace(self) -> Trace:
        """What this process's workers did when, where the trainer was asked to record it."""
        return Trace.of(itertools.chain.from_iterable(worker.spans or () for worker in self._assembly.workers.workers))

    def gather_trace(self) -> Trace:
        """Return what all workers did when, on every process; clocks of different hosts are not set by each other."""
        own = self.trace.spans
        gathered = [own] if self._assembly.transport == "threads" else self._first.transport.gather_objects(own)
        return Trace.of(itertools.chain.from_iterable(gathered))

    @property
    def job_steps(self) -> int | None:
        """How many optimizer steps the job says that it takes; None where it does not say, or its data has no length."""
        return self._length(self.job.epochs, self.job.steps)

    def describe(self) -> str:
        """Return in a few lines what a run will be: its workers, its micro-batches, its arithmetic."""
        places = [str(worker.device) for worker in self._assembly.workers.workers]
        threads = self._assembly.intra_op_threads or torch.get_num_threads()
        kind = f"{self.size} {'worker' if self.size == 1 else 'workers'}"
        where = "in this process" if self.size == 1 else f"as {self._assembly.transport}, started by {self._assembly.started_by}"
        return "\n".join(
            [
                f"job        {self.job!r}",
                f"plan       {self.plan}",
                f"workers    {kind} {where}, on {', '.join(dict.fromkeys(places))}, {threads} intra-op thread(s) each",
                f"arithmetic {self.plan.precision}, {self.plan.micro_batches} micro-batch(es) of the global batch, sums in "
                f"{'one fixed order: the same bits in every layout' if self.plan.reproducible else 'any order: equal to rounding'}",
            ]
        )

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[LocalBatch]:
        """Yield this process's part of every global batch, from where training stands until `epochs` or `steps` are done.

        Both count from the start of training, so that calling it again goes on; None takes the job's. Give each to `step`.

        Raises:
            UsageError: the job has no data, or neither says how long.
        """
        if epochs is None and steps is None:
            epochs, steps = self.job.epochs, self.job.steps
        if epochs is None and steps is None:
            raise UsageError("how long to train is not said; pass epochs= or steps=, or Job(epochs=...)")
        if self.total_steps is None:
            self.total_steps = self._length(epochs, steps)
        return self._batches(self._training_source(), epochs, steps)

    def _batches(self, source: Source, epochs: int | None, steps: int | None) -> Iterator[LocalBatch]:
        while (epochs is None or self.position.epoch < epochs) and (steps is None or self.steps_done < steps):
            epoch, any_batch = self.position.epoch, self.position.batch > 0
            with contextlib.closing(self._local_batches(source, self.position)) as batches:
                for batch in batches:
                    any_batch = True
                    yield batch
                    self.position = max(self.position, _after(batch.position))
                    if steps is not None and self.steps_done >= steps:
                        if source.num_batches is None or self.position.batch < source.num_batches:
                            return
                        break
            if not any_batch:
                raise UsageError(f"epoch {epoch} of the data has no batch; pass data with at least one, or drop_last=False")
            self.end_epoch()

    def step(self, batch: Any) -> StepReport:
        """Take one optimizer step on a global batch and return its report.

        Args:
            batch: what `batches` yields, or the whole global batch, the same on every process.

        Raises:
            MismatchError: processes were given different batches or are at different steps.
            PeerError: another worker failed first.
        """
        start = time.perf_counter()
        local, key = self._cut(batch)
        number = self.steps_done + 1
        placed = Share(local.sizes, local.micro_batches, key)
        outcomes = self._assembly.workers.run(lambda worker: self._step_of(worker, placed, number))[0]
        self.steps_done, self.position = number, max(self.position, _after(local.position))
        return self._report(outcomes, local, number, start)

    def _step_of(self, worker: Worker, share: Share, number: int) -> dict[str, Outcome]:
        worker.schedule(self.total_steps)
        outcomes = worker.step(share, number)
        if self.job.scheduler_every == "step":
            for objective in worker.objectives:
                objective.advance(outcomes[objective.name].read_loss)
        return outcomes

    def _report(self, outcomes: Mapping[str, Outcome], local: LocalBatch, number: int, start: float) -> StepReport:
        metrics = {
            key if len(outcomes) == 1 else f"{name}/{key}": value
            for name, outcome in outcomes.items()
            for key, value in outcome.extras.items()
        }
        first = next(iter(outcomes.values()))
        total, count = self._epoch_loss
        self._epoch_loss = (total + first.loss * first.count, count + first.count)
        return StepReport(
            step=number,
            epoch=local.position.epoch,
            losses={name: outcome.loss for name, outcome in outcomes.items()},
            lrs={name: outcome.lr for name, outcome in outcomes.items() if outcome.lr is not None},
            grad_norm=first.grad_norm,
            metrics=metrics,
            rows=local.rows,
            count=first.count,
            seconds=time.perf_counter() - start,
        )

    def end_epoch(self) -> None:
        """Go on to the next epoch and step the schedulers that go by epochs; `batches` does it by itself."""
        total, count = self._epoch_loss
        self.position, self._epoch_loss = Position(self.position.epoch + 1, 0), (0.0, 0.0)
        if self.job.scheduler_every == "epoch" and count:

            def advance(worker: Worker) -> None:
                for objective in worker.objectives:
                    objective.advance(lambda: float(total / count))

            self._assembly.workers.run(advance)

    def fit(
        self,
        epochs: int | None = None,
        steps: int | None = None,
        *,
        loggers: Iterable[Logger] = (),
        evaluate_every: int | None = None,
    ) -> StepReport | None:
        """Train until `epochs` or `steps` are done and return the last step's report; None where they were done already.

        Args:
            epochs: passes over the data since the start of training; None takes the job's.
            steps: optimizer steps since the start of training; None takes the job's.
            loggers: functions of a report; they see every step's and every evaluation's, on the main process alone.
            evaluate_every: evaluate the job's held-out data after every so many steps.
        """
        loggers = list(loggers) if self.is_main else []
        report = None
        for batch in self.batches(epochs, steps):
            report = self.step(batch)
            for logger in loggers:
                logger(report)
            if evaluate_every is not None and self.steps_done % evaluate_every == 0:
                evaluation = self.evaluate()
                for logger in loggers:
                    logger(evaluation)
        return report

    def evaluate(self, data: Any = None, metrics: Mapping[str, Any] | None = None) -> EvaluationReport:
        """Return the loss and the metrics over all samples of `data`, each taken once, in order, in evaluation mode.

        Args:
            data: as for a job; None takes the job's held-out data.
            metrics: as for a job; None takes the job's.

        Raises:
            UsageError: there is no data, or predictions or targets cannot be told from the batches.
        """
        start = time.perf_counter()
        metrics = self.job.metrics if metrics is None else metrics
        fold, rows, total, count = MetricFold(metrics), 0, 0.0, 0.0
        predict, target = (self.job.predict or default_predict, self.job.target or default_target) if metrics else (None, None)
        with_loss = len(self.job.losses) == 1
        for batch, parts in self._evaluated(self._held_out(data), with_loss=with_loss, predict=predict, target=target):
            rows += batch.rows
            for part in parts:
                total, count = total + (part.total or 0.0), count + part.count
                if self.is_main and metrics:
                    fold.update(part)
        if not rows:
            raise UsageError("there is nothing to evaluate: the data is empty")
        values = self._from_main(fold.compute) if metrics else {}
        loss = total / count if with_loss and count else None
        return EvaluationReport(step=self.steps_done, loss=loss, metrics=values, rows=rows, seconds=time.perf_counter() - start)

    def predict(self, data: Any) -> Any:
        """Return the predictions for all samples of `data`, in order, joined along dimension 0, on every process."""
        source = self._held_out(data)
        predict = self.job.predict or default_predict
        parts = self._evaluated(source, with_loss=False, predict=predict, target=None)
        return join_outputs([part for _, batch_parts in parts for part in batch_parts])

    def check_workers(self, check: Callable[[nn.Module, Transport], None]) -> None:
        """Have every worker hold its module against the others' with `check(model, transport)`, which raises where they differ."""
        self._assembly.workers.run(lambda worker: check(worker.model, worker.transport))

    def close(self) -> None:
        """End the worker threads, leave the process group where the trainer made it, and restore torch's thread count."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trainer({self.job!r}, {self.plan!r}, rank={self.rank} of {self.size}, steps_done={self.steps_done})"

    @property
    def _first(self) -> Worker:
        return self._assembly.workers.workers[0]

    @property
    def _mine(self) -> range:
        """The micro-batches that this process's workers take: one worker's, or all."""
        assert self.plan.micro_batches is not None
        alone = self._assembly.transport == "threads"
        return range(self.plan.micro_batches) if alone else self.layout.micro_batches_of(self.rank)

    def _cut(self, batch: Any) -> tuple[LocalBatch, int | None]:
        """Return this process's part of a batch, and the batch's digest where the user's own loop might hand out different ones."""
        if isinstance(batch, LocalBatch):
            return batch, None
        assert self.plan.micro_batches is not None
        with self._announcing("cutting the batch"):
            local = cut(batch, self.plan.micro_batches, self._mine, self.position, self.job.split)
        return local, digest(batch) if self._assembly.transport == "processes" and self.size > 1 else None

    def _training_source(self) -> Source:
        if self._source is None:
            if self.job.data is None:
                raise UsageError("the job has no data; pass Job(data=...), or call step with batches of your own")
            self._source = self._new_source(self.job.data, shuffle=self.job.shuffle, drop_last=self.job.drop_last)
            rows = self._source.batch_size
            if rows is not None and self.plan.replicas is not None and rows < self.plan.replicas:
                raise UsageError(
                    f"replicas={self.plan.replicas} needs at least {self.plan.replicas} rows in a batch, got batch_size={rows}; "
                    f"pass batch_size={self.plan.replicas} or more, or replicas={rows}"
                )
        return self._source

    def _held_out(self, data: Any) -> Source:
        data = self.job.held_out if data is None else data
        if data is None:
            raise UsageError("there is no data to evaluate; pass evaluate(data), or Job(held_out=...)")
        return self._new_source(data, shuffle=False, drop_last=False)

    def _new_source(self, data: Any, *, shuffle: bool | None, drop_last: bool | None) -> Source:
        is_loader = isinstance(data, torch.utils.data.DataLoader)
        uses_gpu = self._first.device.type == "cuda"
        return Source(
            data,
            batch_size=None if is_loader else self.job.batch_size or getattr(self.job.data, "batch_size", None),
            seed=self.job.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=None if is_loader else self.job.collate,
            num_workers=self.job.num_workers or 0,
            pin_memory=uses_gpu if self.job.pin_memory is None else self.job.pin_memory,
            split=self.job.split,
        )

    def _length(self, epochs: int | None, steps: int | None) -> int | None:
        batches = None if epochs is None else self._training_source().num_batches
        by_epochs = None if epochs is None or batches is None else epochs * batches
        return min((number for number in (steps, by_epochs) if number is not None), default=None)

    def _local_batches(self, source: Source, start: Position) -> Generator[LocalBatch]:
        """Yield a source's batches; a failure to load one is every worker's failure."""
        assert self.plan.micro_batches is not None
        with self._announcing("loading"):
            batches = source.batches(start, micro_batches=self.plan.micro_batches, mine=self._mine)
        try:
            while True:
                with self._announcing("loading"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def _evaluated(self, source: Source, **options: Any) -> Iterator[tuple[LocalBatch, list[Evaluated]]]:
        with contextlib.closing(self._local_batches(source, Position())) as batches:
            for number, batch in enumerate(batches):
                share = Share(batch.sizes, batch.micro_batches)
                evaluate = functools.partial(Worker.evaluate, share=share, number=number, **options)
                parts = self._assembly.workers.run(evaluate)
                if self._assembly.transport == "processes":
                    parts = self._first.transport.gather_objects(parts[0])
                yield batch, in_order(parts)
        source.close()

    def _from_main(self, compute: Callable[[], T]) -> T:
        """Return on every process what `compute` returns on the main one."""
        with self._announcing("metrics"):
            value = compute() if self.is_main else None
        gathered: list[Any] = [value] if self._assembly.transport == "threads" else self._first.transport.gather_objects(value)
        result: T = gathered[0]
        return result

    @contextlib.contextmanager
    def _announcing(self, doing: str) -> Iterator[None]:
        """Tell the other processes of a failure outside of the workers; they would wait for this one."""
        try:
            yield
        except Exception as error:
            if self._assembly.transport == "processes" and not isinstance(error, PeerError):
                failure = Failure.of(error, rank=self.rank, step=self.steps_done + 1, doing=doing)
                error.add_note(failure.where)
                self._first.transport.fail(failure)
            raise


def _after(position: Position) -> Position:
    return Position(position.epoch, position.batch + 1)


def _close(assembly: Assembly, threads_before: int) -> None:
    assembly.workers.close()
    if assembly.intra_op_threads is not None:
        torch.set_num_threads(threads_before)
