"""The one place where the parts meet: a job and a plan in, a training run out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.assembly import Assembly, assemble
from paceline.checkpoint import Checkpoints, State
from paceline.data.contents import digest
from paceline.data.local import LocalBatch
from paceline.data.order import Position
from paceline.data.source import Source
from paceline.errors import Failure, PeerError, UsageError
from paceline.evaluation import Best, BestSoFar, MetricFold, default_predict, default_target, in_order, join_outputs
from paceline.feed import Feed
from paceline.job import Job
from paceline.plan import Plan
from paceline.report.reports import EvaluationReport, Logger, StepReport
from paceline.resume import facts_of, find_problems, put_back, take_state
from paceline.stopping import use_stop_signals
from paceline.trace import Trace
from paceline.transport.base import Transport
from paceline.worker.worker import Evaluated, Outcome, Share, Worker

T = TypeVar("T")
LOG = logging.getLogger("paceline")


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
        objects: further things with `state_dict` and `load_state_dict` that checkpoints shall hold, by name.

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
        objects: Mapping[str, Any] | None = None,
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
        alone = self._assembly.transport == "threads"
        self._feed = Feed(
            job,
            self.plan,
            range(self.plan.micro_batches or 1) if alone else self.layout.micro_batches_of(self.rank),
            uses_gpu=self._first.device.type == "cuda",
            announcing=functools.partial(_announcing, self._assembly),
        )
        self._epoch_loss: tuple[Any, Any] = (0.0, 0.0)
        self._objects = dict(objects or {})
        self._stop_agreed = False
        self._scheduled_steps: int | None = None
        self._best = BestSoFar()

    @property
    def model(self) -> nn.Module:
        """The user's module, with the current weights."""
        return self._first.model

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers by the name of their loss; on a process whose workers leave the updates to another, none."""
        return {o.name: o.optimizer for o in self._first.objectives if o.optimizer is not None}

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
        return self._feed.length(self.job.epochs, self.job.steps)

    @property
    def stopped(self) -> bool:
        """Whether the last step was one after which a signal, to any of the workers, asked to stop."""
        return self._stop_agreed

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

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Generator[LocalBatch]:
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
            self.total_steps = self._feed.length(epochs, steps)
        if self.job.scheduler is not None and self._scheduled_steps not in (None, self.total_steps):
            LOG.warning(
                "the scheduler was made for %s steps and is made again for %s: the learning rate goes on by the new length",
                self._scheduled_steps,
                self.total_steps,
            )
            self._scheduled_steps = self.total_steps
        return self._batches(self._feed.training, epochs, steps)

    def _batches(self, source: Source, epochs: int | None, steps: int | None) -> Generator[LocalBatch]:
        while (epochs is None or self.position.epoch < epochs) and (steps is None or self.steps_done < steps):
            epoch, any_batch = self.position.epoch, self.position.batch > 0
            with contextlib.closing(self._feed.batches(source, self.position)) as batches:
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
        place = (local.position.epoch, local.position.batch, self._feed.num_batches)
        share = Share(local.sizes, local.micro_batches, key, place)
        outcomes = self._assembly.workers.run(lambda worker: worker.step(share, number, self.total_steps))[0]
        self.steps_done, self.position = number, max(self.position, _after(local.position))
        return self._report(outcomes, local, number, start)

    def _report(self, outcomes: Mapping[str, Outcome], local: LocalBatch, number: int, start: float) -> StepReport:
        metrics = {
            key if len(outcomes) == 1 else f"{name}/{key}": value
            for name, outcome in outcomes.items()
            for key, value in outcome.extras.items()
        }
        first = next(iter(outcomes.values()))
        self._stop_agreed = any(outcome.stop for outcome in outcomes.values())
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
        best: Best | None = None,
        checkpoints: str | os.PathLike[str] | Checkpoints | None = None,
        save_every: int | None = None,
        keep: int | None = 3,
    ) -> StepReport | None:
        """Train until `epochs` or `steps` are done and return the last step's report; None where they were done already.

        Ctrl-C and SIGTERM finish the step, and save it where there are checkpoints, before they interrupt; a second one does so at
        once. Calling `fit` again goes on from where training stands.

        Args:
            epochs: passes over the data since the start of training; None takes the job's.
            steps: optimizer steps since the start of training; None takes the job's.
            loggers: functions of a report; they see every step's and every evaluation's, on the main process alone.
            evaluate_every: evaluate the job's held-out data after every so many steps.
            best: which evaluation is the best; its checkpoint is kept, and training may stop for want of a better one.
            checkpoints: the folder to save into at the end, when stopped, at the best, and every `save_every` steps.
            save_every: number of steps from one checkpoint to the next.
            keep: how many checkpoints stay, besides the best; None keeps all.
        """
        _check_intervals(evaluate_every, best, save_every, checkpoints)
        store = Checkpoints(checkpoints) if isinstance(checkpoints, str | os.PathLike) else checkpoints
        loggers = list(loggers) if self.is_main else []
        report, saved = None, self.steps_done
        if self._best.is_out_of_patience(best):
            return None

        def stop() -> None:
            self._first.stop_requested = True

        self._first.stop_requested = False
        with use_stop_signals(stop) as request, contextlib.closing(self.batches(epochs, steps)) as batches:
            for batch in batches:
                report, is_best = self.step(batch), False
                self._tell(loggers, report)
                if evaluate_every is not None and self.steps_done % evaluate_every == 0:
                    evaluation = self.evaluate()
                    self._tell(loggers, evaluation)
                    is_best = best is not None and self._best.improves(best, evaluation, self.steps_done)
                due = save_every is not None and self.steps_done % save_every == 0
                if store is not None and (due or is_best or self._stop_agreed):
                    self.save(store, keep=keep, best=is_best)
                    saved = self.steps_done
                if self._stop_agreed:
                    request.leave()
                if self._best.is_out_of_patience(best):
                    break
        if store is not None and saved != self.steps_done:
            self.save(store, keep=keep)
        return report

    def _tell(self, loggers: Sequence[Logger], report: StepReport | EvaluationReport) -> None:
        with _announcing(self._assembly, "logging"):
            for logger in loggers:
                logger(report)

    def save(self, checkpoints: str | os.PathLike[str] | Checkpoints, *, keep: int | None = 3, best: bool = False) -> Path:
        """Save the whole run into a folder of checkpoints and return the new one's path; the main process writes.

        Args:
            checkpoints: the folder, made where it is missing.
            keep: how many checkpoints stay, this one included, besides the best; None keeps all.
            best: keep this one until a better one is saved.

        Raises:
            UsageError: the folder cannot be written, or the state holds what cannot be stored; earlier checkpoints stay whole.
        """
        store = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        return self.from_main(lambda: store.save(self._state(), keep=keep, best=best), "saving")

    def load(self, checkpoint: str | os.PathLike[str]) -> list[str]:
        """Go on from a checkpoint, whatever plan it was saved under, and return remarks on what differs.

        The main process reads and verifies it before anything is changed, and the others get it from there.

        Raises:
            CheckpointError: it is damaged; the error names the damage and a whole one to use instead.
            UsageError: it is of another model, optimizer or place in other data.
        """
        state = self._read(checkpoint)
        problems, remarks = find_problems(self._assembly, state, self._objects, self._facts())
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise UsageError(f"the checkpoint of step {state.steps_done} does not fit: {shown}; nothing was loaded")
        put_back(self._assembly, state, self._objects, self.total_steps)
        progress = state.progress
        self.steps_done, self.position = state.steps_done, Position(progress["epoch"], progress["batch"])
        self._first.steps_done = self.steps_done
        self._epoch_loss, self._best = tuple(progress["epoch_loss"]), BestSoFar(progress["best"])
        self._scheduled_steps = progress["total_steps"]
        return remarks

    def check(self, checkpoint: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
        """Return what keeps a checkpoint from being loaded, and the remarks that `load` would make; changes nothing.

        Raises:
            CheckpointError: it is damaged; the error names the damage and a whole one to use instead.
        """
        return find_problems(self._assembly, self._read(checkpoint), self._objects, self._facts())

    def _read(self, checkpoint: str | os.PathLike[str]) -> State:
        path = Path(checkpoint)
        return self.from_main(lambda: Checkpoints(path.parent).load(path), "loading the checkpoint")

    def resume(self, checkpoints: str | os.PathLike[str] | Checkpoints) -> Path | None:
        """Go on from the newest checkpoint of a folder and return its path; None, and nothing done, where there is none."""
        store = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        path = self.from_main(store.latest, "looking for checkpoints")
        if path is not None:
            self.load(path)
        return path

    def _state(self) -> State:
        total, count = self._epoch_loss
        progress = {
            "steps_done": self.steps_done,
            "epoch": self.position.epoch,
            "batch": self.position.batch,
            "epoch_loss": [float(total), float(count)],
            "best": self._best.memory,
            "total_steps": self.total_steps,
        }
        return take_state(self._assembly, progress, self._objects, self._facts())

    def _facts(self) -> dict[str, Any]:
        source = None if self.job.data is None else self._feed.training
        rows, samples = (None, None) if source is None else (source.batch_size, source.num_samples)
        return facts_of(self._assembly, self.job, rows, samples)

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
        for batch, parts in self._evaluated(self._feed.held_out(data), with_loss=with_loss, predict=predict, target=target):
            rows += batch.rows
            for part in parts:
                total, count = total + (part.total or 0.0), count + part.count
                if self.is_main and metrics:
                    with _announcing(self._assembly, "metrics"):
                        fold.update(part)
        if not rows:
            raise UsageError("there is nothing to evaluate: the data is empty")
        values = self.from_main(fold.compute, "metrics") if metrics else {}
        loss = total / count if with_loss and count else None
        return EvaluationReport(step=self.steps_done, loss=loss, metrics=values, rows=rows, seconds=time.perf_counter() - start)

    def predict(self, data: Any) -> Any:
        """Return the predictions for all samples of `data`, in order, joined along dimension 0, on every process."""
        source = self._feed.held_out(data)
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._assembly.transport == "processes" and not isinstance(error, PeerError):
            # The others would learn only that this one has left.
            self._first.transport.fail(Failure.of(error, rank=self.rank, step=self.steps_done, doing="after this step"))
        self.close()

    def __repr__(self) -> str:
        return f"Trainer({self.job!r}, {self.plan!r}, rank={self.rank} of {self.size}, steps_done={self.steps_done})"

    @property
    def _first(self) -> Worker:
        return self._assembly.workers.workers[0]

    def _cut(self, batch: Any) -> tuple[LocalBatch, int | None]:
        """Return this process's part of a batch, and the batch's digest where the user's own loop might hand out different ones."""
        if isinstance(batch, LocalBatch):
            return batch, None
        return self._feed.cut(batch, self.position), digest(
            batch
        ) if self._assembly.transport == "processes" and self.size > 1 else None

    def _evaluated(self, source: Source, **options: Any) -> Iterator[tuple[LocalBatch, list[Evaluated]]]:
        with contextlib.closing(self._feed.batches(source, Position())) as batches:
            for number, batch in enumerate(batches):
                share = Share(batch.sizes, batch.micro_batches)
                evaluate = functools.partial(Worker.evaluate, share=share, number=number, **options)
                parts = self._assembly.workers.run(evaluate)
                if self._assembly.transport == "processes":
                    parts = self._first.transport.gather_objects(parts[0])
                yield batch, in_order(parts)
        source.close()

    def from_main(self, compute: Callable[[], T], doing: str) -> T:
        """Return on every process what `compute` returns on the main one; `doing` says in a failure what it was about."""
        with _announcing(self._assembly, doing):
            value = compute() if self.is_main else None
        gathered: list[Any] = [value] if self._assembly.transport == "threads" else self._first.transport.gather_objects(value)
        result: T = gathered[0]
        return result


@contextlib.contextmanager
def _announcing(assembly: Assembly, doing: str) -> Iterator[None]:
    """Tell the other processes of a failure outside of the workers; they would wait for this one."""
    try:
        yield
    except Exception as error:
        worker = assembly.workers.workers[0]
        if assembly.transport == "processes" and not isinstance(error, PeerError):
            failure = Failure.of(error, rank=worker.rank, step=worker.steps_done + 1, doing=doing)
            error.add_note(failure.where)
            worker.transport.fail(failure)
        raise


def _check_intervals(evaluate_every: int | None, best: Best | None, save_every: int | None, checkpoints: object) -> None:
    """Raise `UsageError` where what `fit` is asked to do every so many steps cannot be done."""
    if best is not None and evaluate_every is None:
        raise UsageError(f"best={best!r} needs evaluations to compare; pass evaluate_every=, a number of steps")
    for name, value in (("evaluate_every", evaluate_every), ("save_every", save_every)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name}={value!r} is not a whole number of steps, at least 1; leave it out for never")
    if save_every is not None and checkpoints is None:
        raise UsageError(f"save_every={save_every!r} needs a folder to save into; pass checkpoints=")


def _after(position: Position) -> Position:
    return Position(position.epoch, position.batch + 1)


def _close(assembly: Assembly, threads_before: int) -> None:
    assembly.workers.close()
    if assembly.intra_op_threads is not None:
        torch.set_num_threads(threads_before)
