"""The data of a job, as one thing that gives every process its own part of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from paceline.data.batch import aligned
from paceline.data.failed import unpacked
from paceline.data.given import Options, understand
from paceline.data.loading import Collate, Loaded, MapLoads, Request, StreamLoads, WorkerStart
from paceline.data.local import LocalBatch, check_share
from paceline.data.order import Position, count_batches
from paceline.data.requests import list_requests, order_of
from paceline.data.rows import Split
from paceline.errors import UsageError
from paceline.random_streams import stream_seed


class Source:
    """Global batches in an order that depends on the seed and the epoch only, of which each process loads its part.

    Samples are collated per micro-batch, so neither the layout nor the number of loader workers changes what a
    micro-batch holds. While a sample is loaded, torch's, numpy's and Python's generators are seeded by (seed, epoch,
    sample), and put back afterwards: one thread of a process at a time may iterate a source without workers.

    Args:
        data: one of
            - a dataset, list, array or anything else with `__getitem__` and `__len__`; a tuple of tensors with the same
              number of rows is taken as the samples of a `TensorDataset`;
            - a torch `DataLoader`: its dataset, batch size (that of the global batch), collate function, order and
              worker options are taken; with `batch_size=None` every item is a global batch and is cut into micro-batches;
            - an `IterableDataset`, another iterable or a generator function: every process goes through all of it. An
              iterator that can be gone through only once makes one epoch.
        batch_size: rows of a global batch, over all processes together; None with a `DataLoader`.
        seed: of the order and of every random draw while loading.
        shuffle: whether samples are visited in random order. Default: what a loader says, otherwise True for data with
            `__getitem__` and False for a stream.
        drop_last: whether a last batch with fewer rows is left out. Default: what a loader says, otherwise False.
        collate: makes a micro-batch of a list of samples. Default: `torch.utils.data.default_collate`.
        num_workers: loader processes; 0 loads in the calling process.
        pin_memory: whether micro-batches are put into page-locked memory, where there is an accelerator.
        prefetch: local batches that each loader process has ready.
        split: path -> dimension of the rows, for batches that come whole; see `split_batch`.

    Raises:
        UsageError: the data, or the options for it, cannot be used.

    >>> source = Source(list(range(10)), batch_size=4, seed=0, shuffle=False)
    >>> [dict(local.micro_batches) for local in source.batches(Position(epoch=0, batch=1), micro_batches=2, mine=range(1))]
    [{0: tensor([4, 5])}, {0: tensor([8])}]
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int | None = None,
        seed: int,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        collate: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch: int = 2,
        split: Split | None = None,
    ) -> None:
        self.seed, self.split = seed, split
        options = Options(num_workers=num_workers, pin_memory=pin_memory, prefetch=prefetch)
        self._given = understand(
            data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, collate=collate, options=options
        )
        self._requests = _Requests(iter(()))
        self._persistent: DataLoader[Loaded] | None = None
        self._busy = False
        self._used_up = False

    @property
    def batch_size(self) -> int | None:
        """Rows of a full global batch; None where the data itself makes the batches."""
        return self._given.batch_size

    @property
    def num_samples(self) -> int | None:
        """Samples in one epoch before `drop_last`, or None where that is not known beforehand."""
        given = self._given
        return (
            None
            if given.whole or given.batch_sampler is not None
            else _length(given.data if given.sampler is None else given.sampler)
        )

    @property
    def num_batches(self) -> int | None:
        """Global batches in one epoch, or None where that is not known beforehand."""
        given = self._given
        if given.batch_sampler is not None:
            return _length(given.batch_sampler)
        items = _length(given.data if given.sampler is None else given.sampler)
        return None if items is None else count_batches(items, given.batch_size or 1, drop_last=given.drop_last)

    def __len__(self) -> int:
        number = self.num_batches
        if number is None:
            raise TypeError("the number of batches is not known beforehand: the data has no __len__")
        return number

    def batches(self, start: Position, *, micro_batches: int, mine: range) -> Iterator[LocalBatch]:
        """Yield this process's part of every global batch of the epoch of `start`, from `start.batch` on.

        Nothing is repeated and nothing left out. A batch of which this process owns no rows is yielded too, so that all
        processes take the same number of steps. Closing the iterator ends the loader's worker processes.

        Args:
            start: the place of the first batch.
            micro_batches: into how many micro-batches a global batch is cut, over all processes.
            mine: the numbers of those that this process owns.

        Raises:
            UsageError: `start` is beyond the epoch, the data cannot be gone through again, or a batch cannot be cut.
        """
        check_share(micro_batches, mine)
        given, epoch = self._given, start.epoch
        if given.stream:
            self._check_stream(epoch)
            stream = StreamLoads(
                data=given.data,
                collate=given.collate,
                seed=self.seed,
                batch_size=given.batch_size,
                drop_last=given.drop_last,
                split=self.split,
                start=start,
                micro_batches=micro_batches,
                mine=mine,
            )
            return self._run(lambda: self._loader(stream, None, epoch, keep=False))
        order = order_of(given, seed=self.seed, epoch=epoch)
        if start.batch > len(order):
            raise UsageError(
                f"{start} was asked for, but epoch {epoch} has {len(order)} batches: start at batch 0 to "
                f"{len(order)}; has the data or the batch size changed since the position was saved?"
            )
        return self._run(lambda: self._map_loader(list_requests(order, start, micro_batches, mine, whole=given.whole), epoch))

    def close(self) -> None:
        """End worker processes that a loader with `persistent_workers=True` keeps from epoch to epoch."""
        if self._persistent is not None:
            _stop(self._persistent._iterator)
            self._persistent = None

    def _check_stream(self, epoch: int) -> None:
        """Refuse to go a second time through what can be gone through only once."""
        data = self._given.data
        if not (hasattr(data, "__next__") and iter(data) is data):
            return
        if self._used_up or epoch > 0:
            raise UsageError(
                f"epoch {epoch} was asked for, but the data is a {type(data).__name__}, an iterator that can be gone "
                f"through only once, as epoch 0: give the generator function itself, or an iterable"
            )
        self._used_up = True

    def _run(self, make_loader: Callable[[], DataLoader[Loaded]]) -> Iterator[LocalBatch]:
        """Yield what the loader gives; end its workers however the consumer stops."""
        loader = make_loader()
        keep = loader is self._persistent
        self._busy = self._busy or keep
        iterator: Any = None
        finished = False
        try:
            iterator = iter(loader)
            for loaded in iterator:
                if loaded.error is not None:
                    raise unpacked(loaded.error)
                # A worker's arrays arrive anywhere in memory, and so do tensors over the memory of a numpy array.
                yield LocalBatch(loaded.position, loaded.sizes, aligned(loaded.micro_batches))
            finished = True
        finally:
            if not keep:
                _stop(iterator)
            else:
                self._busy = False
                if not finished:
                    self.close()  # the next epoch starts new workers, which have nothing left to do for this one

    def _map_loader(self, requests: Iterator[Request], epoch: int) -> DataLoader[Loaded]:
        given = self._given
        if self._persistent is not None and not self._busy:
            self._requests.next = requests
            return self._persistent
        dataset = MapLoads(given.data, given.collate, self.seed, whole=given.whole, split=self.split)
        if not given.options.persistent_workers or self._busy:
            return self._loader(dataset, _Requests(requests), epoch, keep=False)
        self._requests = _Requests(requests)
        self._persistent = self._loader(dataset, self._requests, epoch, keep=True)
        return self._persistent

    def _loader(self, dataset: Dataset[Loaded], requests: _Requests | None, epoch: int, *, keep: bool) -> DataLoader[Loaded]:
        """Return the torch loader of which every item is a local batch."""
        options = self._given.options
        workers: dict[str, Any] = {}
        if options.num_workers:
            workers = {
                "prefetch_factor": options.prefetch,
                "persistent_workers": keep,
                "worker_init_fn": WorkerStart(self._given.data, options.worker_init_fn),
                "multiprocessing_context": options.multiprocessing_context,
                "timeout": options.timeout,
            }
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            num_workers=options.num_workers,
            collate_fn=_as_it_is,
            pin_memory=options.pin_memory and torch.accelerator.is_available(),
            # Of its own: torch would otherwise draw the workers' seed from the process-wide generator.
            generator=torch.Generator().manual_seed(stream_seed(self.seed, "loader", epoch)),
            **workers,
        )


class _Requests(Sampler[Request]):
    """The requests of the epoch at hand; a loader that keeps its workers takes the next epoch's from the same object."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self.next = requests

    def __iter__(self) -> Iterator[Request]:
        return self.next


def _as_it_is(loaded: Any) -> Any:
    """Collate nothing: the item is a local batch already."""
    return loaded


def _stop(iterator: Any) -> None:
    """End the workers of a loader's iterator now; dropping it would not, while a traceback still refers to it."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def _length(data: Any) -> int | None:
    """Return `len(data)`, or None where it has none."""
    try:
        return len(data)
    except TypeError:  # there is no __len__, or it refuses, as that of a chained dataset may
        return None
