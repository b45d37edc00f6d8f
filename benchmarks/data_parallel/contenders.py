"""What each contender's processes do: one optimizer step on data that lies in memory already, as its user would write it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.data_parallel.workloads import NUM_BATCHES, WORKLOADS, Batch, Workload, loss, optimizer
from benchmarks.harness import Contender, Stepper
from paceline import Job, Trainer
from paceline.report.reports import StepReport

WORKERS = 2
HERE = "benchmarks.data_parallel.contenders"


class _Report:
    """A step report as a number."""

    def __init__(self, report: StepReport) -> None:
        self._report = report

    def __float__(self) -> float:
        return self._report.loss


class PacelineSteps(Stepper):
    """`for batch in trainer.batches(...): trainer.step(batch)`, with the batches loaded before."""

    def __init__(self, workload: Workload, seed: int, *, transport: str, dropout: bool, fused: bool) -> None:
        inputs, targets = (torch.cat(parts) for parts in zip(*workload.batches(seed), strict=True))
        job = Job(
            model=workload.build(seed, dropout=dropout),
            loss=loss,
            optimizer=lambda named: optimizer(named, fused=fused),
            data=TensorDataset(inputs, targets),
            batch_size=workload.rows,
            shuffle=False,
            clip_norm=workload.clip_norm,
            intra_op_threads=1,
            seed=seed,
        )
        self._trainer = Trainer(job, f"replicas={WORKERS}", transport=transport)
        batches = list(self._trainer.batches(epochs=1))
        assert len(batches) == NUM_BATCHES
        self._batches = itertools.cycle(batches)

    def step(self) -> _Report:
        return _Report(self._trainer.step(next(self._batches)))

    def close(self) -> None:
        self._trainer.close()


class PlainSteps(Stepper):
    """The usual loop over a module, which may be wrapped, on the rows that are this process's."""

    def __init__(
        self,
        model: nn.Module,
        batches: list[Batch],
        *,
        clip_norm: float | None,
        fused: bool,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._batches, self._clip_norm = model, itertools.cycle(batches), clip_norm
        self._optimizer = optimizer(model.parameters(), fused=fused)
        self._leave = leave

    def step(self) -> Tensor:
        self._optimizer.zero_grad()
        value = loss(self._model, next(self._batches))
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._optimizer.step()
        return value.detach()

    def close(self) -> None:
        self._leave()


def paceline(rank: int, *, workload: str, seed: int, transport: str, dropout: bool, fused: bool) -> PacelineSteps:
    """Return a Trainer's steps; with `threads` this process runs both workers."""
    return PacelineSteps(WORKLOADS[workload], seed, transport=transport, dropout=dropout, fused=fused)


def ddp(rank: int, *, workload: str, seed: int, dropout: bool, fused: bool, bucket_view: bool) -> PlainSteps:
    """Return the steps of torch's DistributedDataParallel over gloo, on this rank's half of each batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    each = WORKLOADS[workload]
    wrapped = DistributedDataParallel(each.build(seed, dropout=dropout), gradient_as_bucket_view=bucket_view)
    torch.manual_seed(seed + rank)  # for the masks
    half = halves(each.batches(seed), rank)
    return PlainSteps(wrapped, half, clip_norm=each.clip_norm, fused=fused, leave=dist.destroy_process_group)


def no_communication(rank: int, *, workload: str, seed: int, dropout: bool, fused: bool) -> PlainSteps:
    """Return the steps of a process that trains a copy of its own on half of each batch."""
    torch.set_num_threads(1)
    each = WORKLOADS[workload]
    half = halves(each.batches(seed), rank)
    return PlainSteps(each.build(seed, dropout=dropout), half, clip_norm=each.clip_norm, fused=fused)


def one_process(rank: int, *, workload: str, seed: int, dropout: bool, fused: bool, threads: int = WORKERS) -> PlainSteps:
    """Return the steps of one process that takes whole batches, by default with as many intra-op threads as others have workers."""
    torch.set_num_threads(threads)
    each = WORKLOADS[workload]
    return PlainSteps(each.build(seed, dropout=dropout), each.batches(seed), clip_norm=each.clip_norm, fused=fused)


def halves(batches: list[Batch], rank: int) -> list[Batch]:
    """Return a rank's rows of each batch, in memory of their own."""
    rows = [slice(rank * len(inputs) // WORKERS, (rank + 1) * len(inputs) // WORKERS) for inputs, _ in batches]
    return [(inputs[mine].clone(), targets[mine].clone()) for (inputs, targets), mine in zip(batches, rows, strict=True)]


DDP, LIMIT, ONE_PROCESS = "torch DDP", "no communication", "one process, 2 intra-op threads"


def contenders(workload: str, seed: int, *, fused: bool, only: Collection[str] | None = None) -> list[Contender]:
    """Return who takes part, in the order of the tables; all, or `only` those."""
    settings = {"workload": workload, "seed": seed, "dropout": True, "fused": fused}
    everyone = [
        Contender("paceline, threads", f"{HERE}:paceline", 1, 1, settings | {"transport": "threads"}),
        Contender("paceline, processes", f"{HERE}:paceline", WORKERS, 1, settings | {"transport": "processes"}, joined=True),
        Contender(DDP, f"{HERE}:ddp", WORKERS, 1, settings | {"bucket_view": False}, joined=True),
        Contender("torch DDP, gradient_as_bucket_view", f"{HERE}:ddp", WORKERS, 1, settings | {"bucket_view": True}, joined=True),
        Contender(ONE_PROCESS, f"{HERE}:one_process", 1, WORKERS, settings),
        Contender(LIMIT, f"{HERE}:no_communication", WORKERS, 1, settings),
    ]
    return [contender for contender in everyone if only is None or contender.name in only]
