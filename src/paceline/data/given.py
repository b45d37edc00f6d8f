"""Understanding what the user gave as data: a dataset, tensors, a torch DataLoader, a stream."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.data.loading import Collate
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """How torch's loader is to run; the names are torch's."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch: int = 2
    persistent_workers: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0


@dataclass(frozen=True, kw_only=True)
class Given:
    """The data in the one form that the rest of the package knows.

    `batch_size` is None where one item of `data` is a whole global batch, or where `batch_sampler` decides. At most one
    of `sampler` and `batch_sampler` is set; without them the order is that of the samples, or shuffled by the seed.
    """

    data: Any
    stream: bool
    batch_size: int | None
    collate: Collate
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    options: Options = field(default_factory=Options)

    @property
    def whole(self) -> bool:
        """Whether one item of the data is a whole global batch."""
        return self.batch_size is None and self.batch_sampler is None


def understand(
    data: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    collate: Collate | None,
    options: Options,
) -> Given:
    """Return the data in one form, or raise UsageError where it cannot be used."""
    _check_numbers(batch_size, options)
    if isinstance(data, DataLoader):
        given = _understand_loader(data, batch_size, shuffle, drop_last, collate, options)
    else:
        given = _understand_plain(data, batch_size, shuffle, drop_last, collate, options)
    if given.stream:
        if given.options.num_workers > 1:
            raise UsageError(
                f"num_workers={given.options.num_workers} was given for data that is iterated: with several workers "
                f"the order of the samples would depend on their number; give num_workers=1 or 0, or a dataset with "
                f"__getitem__ and __len__"
            )
        if shuffle:
            raise UsageError(
                "shuffle=True was given for data that is iterated, whose order is its own: shuffle inside of it, or "
                "give a dataset with __getitem__ and __len__"
            )
    elif given.sampler is None and given.batch_sampler is None:
        _check_length(given)
    return given


def _check_numbers(batch_size: int | None, options: Options) -> None:
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise UsageError(f"batch_size={batch_size!r} was given: allowed is an integer of 1 or more, the rows of a global batch")
    if options.num_workers < 0 or options.prefetch < 1:
        raise UsageError(
            f"num_workers={options.num_workers} and prefetch={options.prefetch} were given: allowed are 0 or more "
            f"worker processes, and 1 or more batches that each has ready"
        )


def _check_length(given: Given) -> None:
    if len(given.data) == 0:
        raise UsageError(f"the {type(given.data).__name__} that was given as data is empty: give at least one sample")
    if given.drop_last and given.batch_size is not None and len(given.data) < given.batch_size:
        raise UsageError(
            f"the data has {len(given.data)} samples, fewer than batch_size={given.batch_size}, and drop_last=True "
            f"drops them all: give a smaller batch_size or drop_last=False"
        )


def _understand_plain(
    data: Any, batch_size: int | None, shuffle: bool | None, drop_last: bool | None, collate: Collate | None, options: Options
) -> Given:
    """Return data that is not a torch DataLoader in one form."""
    if batch_size is None:
        raise UsageError(
            "no batch_size was given: give the rows of a global batch, over all workers together; data that yields "
            "whole batches is given as DataLoader(data, batch_size=None)"
        )
    if isinstance(data, Mapping | str | bytes):
        raise UsageError(
            f"a {type(data).__name__} was given as data: allowed are a dataset (__getitem__ and __len__), a torch "
            f"DataLoader, an iterable or a generator function; choose one split of a dict of datasets, or make "
            f"tensors a list of samples"
        )
    if isinstance(data, tuple) and data and all(isinstance(part, torch.Tensor) for part in data):
        lengths = [part.shape[0] if part.ndim else None for part in data]
        if None in lengths or len(set(lengths)) > 1:
            raise UsageError(
                f"a tuple of tensors with {lengths} rows was given as data: all must have the same number of rows along dimension 0"
            )
        data = TensorDataset(*data)
    stream = _is_stream(data)
    return Given(
        data=data,
        stream=stream,
        batch_size=batch_size,
        collate=collate or default_collate,
        shuffle=not stream and (True if shuffle is None else shuffle),
        drop_last=bool(drop_last),
        options=options,
    )


def _is_stream(data: Any) -> bool:
    """Return whether the data is iterated, as against indexed; refuse what is neither."""
    if isinstance(data, IterableDataset) or inspect.isgeneratorfunction(data):
        return True
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return False
    if hasattr(data, "__iter__"):
        return True
    raise UsageError(
        f"a {type(data).__name__} was given as data: allowed are a dataset (__getitem__ and __len__), a torch "
        f"DataLoader, an iterable or a generator function; add the methods that are missing"
    )


def _understand_loader(
    loader: DataLoader[Any],
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    collate: Collate | None,
    options: Options,
) -> Given:
    """Return the dataset of a torch DataLoader and all that the loader was told, in one form."""
    _check_loader(loader, batch_size, collate, options)
    settings: dict[str, Any] = {
        "data": loader.dataset,
        "collate": loader.collate_fn,
        "options": Options(
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory or options.pin_memory,
            prefetch=loader.prefetch_factor or options.prefetch,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        ),
    }
    if isinstance(loader.dataset, IterableDataset):
        last = loader.drop_last if drop_last is None else drop_last
        return Given(stream=True, batch_size=loader.batch_size, drop_last=last and loader.batch_size is not None, **settings)
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    if own_batches:
        _refuse_shuffle(shuffle, loader.batch_sampler)
        return Given(stream=False, batch_size=None, batch_sampler=loader.batch_sampler, **settings)
    settings |= {
        "stream": False,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last if drop_last is None else drop_last,
    }
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return Given(shuffle=bool(shuffle), **settings)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return Given(shuffle=True if shuffle is None else shuffle, **settings)
    _refuse_shuffle(shuffle, sampler)
    return Given(sampler=sampler, **settings)


def _check_loader(loader: DataLoader[Any], batch_size: int | None, collate: Collate | None, options: Options) -> None:
    """Refuse a loader that splits the data itself, or that was told otherwise than the source."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"a {type(loader).__name__} was given, a DataLoader that iterates in a way of its own, which would be "
            f"passed over: give a plain torch DataLoader, or the dataset"
        )
    for sampler in samplers(loader.sampler, loader.batch_sampler):
        if isinstance(sampler, DistributedSampler):
            raise UsageError(
                "a DataLoader with a DistributedSampler was given: the data is split by paceline, pass the plain dataset or loader"
            )
    rows = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    if batch_size is not None and batch_size != rows:
        raise UsageError(
            f"batch_size={batch_size} was given with a DataLoader of batch_size={rows}: a loader's batch_size is "
            f"that of the global batch, over all workers together; give it in one place only"
        )
    if collate is not None:
        raise UsageError("collate was given together with a DataLoader: give it to the loader, as collate_fn")
    if options.num_workers not in (0, loader.num_workers):
        raise UsageError(
            f"num_workers={options.num_workers} was given with a DataLoader of num_workers={loader.num_workers}: "
            f"give it to the loader only"
        )


def _refuse_shuffle(shuffle: bool | None, sampler: Any) -> None:
    if shuffle:
        raise UsageError(
            f"shuffle=True was given with a {type(sampler).__name__}, which decides the order: leave out one of the two"
        )


def samplers(*given: Any) -> Iterator[Any]:
    """Yield the samplers and what they wrap.

    >>> from torch.utils.data import BatchSampler
    >>> [type(each).__name__ for each in samplers(None, BatchSampler(SequentialSampler([1]), 1, False))]
    ['BatchSampler', 'SequentialSampler']
    """
    for sampler in given:
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "sampler", None)
