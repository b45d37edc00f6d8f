"""What a trainer's workers are fed with: a job's data as this process's part of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from paceline.data.local import LocalBatch, cut
from paceline.data.order import Position
from paceline.data.source import Source
from paceline.errors import UsageError
from paceline.job import Job
from paceline.plan import Plan


class Feed:
    """The sources of a job's data under a plan that nothing in is left open.

    Args:
        job: whose data it is.
        plan: into how many micro-batches a global batch is cut.
        mine: the micro-batches that this process's workers take.
        uses_gpu: whether they lie on a GPU, which pinned memory is for.
        announcing: a context that tells the other processes of a failure inside; they would wait for this one.
    """

    def __init__(
        self, job: Job, plan: Plan, mine: range, *, uses_gpu: bool, announcing: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        assert plan.replicas is not None
        assert plan.micro_batches is not None
        self._job, self._replicas, self._micro_batches, self._mine = job, plan.replicas, plan.micro_batches, mine
        self._uses_gpu, self._announcing = uses_gpu, announcing
        self._training: Source | None = None

    @property
    def training(self) -> Source:
        """The job's data to train on.

        Raises:
            UsageError: there is none, or its batches have fewer rows than there are replicas.
        """
        if self._training is None:
            if self._job.data is None:
                raise UsageError("the job has no data; pass Job(data=...), or call step with batches of your own")
            self._training = self._source(self._job.data, shuffle=self._job.shuffle, drop_last=self._job.drop_last)
            rows = self._training.batch_size
            if rows is not None and rows < self._replicas:
                raise UsageError(
                    f"replicas={self._replicas} needs at least {self._replicas} rows in a batch, got batch_size={rows}; "
                    f"pass batch_size={self._replicas} or more, or replicas={rows}"
                )
        return self._training

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch of the data to train on, as far as they have been looked at; None where that is not known."""
        return None if self._training is None else self._training.num_batches

    def held_out(self, data: Any) -> Source:
        """Return data to evaluate on, taken whole and in order: the job's where None is given."""
        data = self._job.held_out if data is None else data
        if data is None:
            raise UsageError("there is no data to evaluate; pass evaluate(data), or Job(held_out=...)")
        return self._source(data, shuffle=False, drop_last=False)

    def length(self, epochs: int | None, steps: int | None) -> int | None:
        """Return the number of steps that epochs or steps come to, whichever ends first; None where the data has no length."""
        batches = None if epochs is None else self.training.num_batches
        by_epochs = None if epochs is None or batches is None else epochs * batches
        return min((number for number in (steps, by_epochs) if number is not None), default=None)

    def batches(self, source: Source, start: Position) -> Generator[LocalBatch]:
        """Yield this process's part of an epoch of a source; a failure to load it is every worker's failure."""
        with self._announcing("loading"):
            batches = source.batches(start, micro_batches=self._micro_batches, mine=self._mine)
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

    def cut(self, batch: Any, position: Position) -> LocalBatch:
        """Return this process's part of a global batch that the user's own loop hands in."""
        with self._announcing("cutting the batch"):
            return cut(batch, self._micro_batches, self._mine, position, self._job.split)

    def _source(self, data: Any, *, shuffle: bool | None, drop_last: bool | None) -> Source:
        is_loader = isinstance(data, DataLoader)
        return Source(
            data,
            batch_size=None if is_loader else self._job.batch_size or getattr(self._job.data, "batch_size", None),
            seed=self._job.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            collate=None if is_loader else self._job.collate,
            num_workers=self._job.num_workers or 0,
            pin_memory=self._uses_gpu if self._job.pin_memory is None else self._job.pin_memory,
            split=self._job.split,
        )
