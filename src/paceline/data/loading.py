"""Fetching samples with the generators seeded by what is fetched, in this process or in a loader's worker.

The classes here are the datasets that torch's DataLoader is given: one item is a whole local batch.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from paceline.data.batch import even_sizes
from paceline.data.contents import pin
from paceline.data.failed import Noting, packed
from paceline.data.local import bounds, cut
from paceline.data.order import Position
from paceline.data.rows import Split
from paceline.data.tree import Batch
from paceline.errors import UsageError
from paceline.random_streams import stream_seed, use_random_stream

Collate = Callable[[Any], Batch]


@dataclass(frozen=True)
class Request:
    """One global batch to be fetched.

    `runs` are the owned micro-batches as (number, indices, repeats); a repeat says how often the epoch had the
    same index before. With batches that come whole, there is one run with one index.
    """

    position: Position
    sizes: tuple[int, ...]
    runs: list[tuple[int, list[Any], list[int]]]
    micro_batches: int
    mine: range


@dataclass(frozen=True)
class Loaded:
    """What a loader hands over: a local batch, or the exception that loading it raised in a worker, packed."""

    position: Position
    sizes: tuple[int, ...]
    micro_batches: dict[int, Any]
    error: bytes | None = None

    def pin_memory(self) -> Loaded:
        """Return the same in page-locked memory; torch's loader calls this by its name."""
        return Loaded(self.position, self.sizes, pin(self.micro_batches), self.error)


def reseed(seed: int) -> None:
    """Seed the process-wide generators, inside of a block of `use_random_stream` that puts them back.

    Saving and putting back costs ten times as much as seeding: it is done once per batch, this once per sample.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def visit_seed(seed: int, what: str, epoch: int, index: Any, repeat: int = 0) -> int:
    """Return the seed for loading the sample at `index`; `repeat` tells apart what a sampler draws several times."""
    name = index if isinstance(index, int | str) else repr(index)
    return stream_seed(seed, what, epoch, name, repeat) if repeat else stream_seed(seed, what, epoch, name)


def in_place(error: Exception, position: Position) -> Loaded:
    """Return `error` as an item, to be raised in the consumer's process; where this is that process, raise it."""
    if get_worker_info() is None:
        raise error
    return Loaded(position, (), {}, packed(error))


@dataclass(frozen=True)
class WorkerStart:
    """Prepares a loader's worker: the user's `worker_init_fn` and dataset find the user's dataset in the worker info."""

    data: Any
    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        # A group of its own: a signal to the run's whole group asks it to finish its step, which needs this process. When the
        # process that started it ends, it ends by itself.
        if hasattr(os, "setpgid"):
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
        object.__setattr__(get_worker_info(), "dataset", self.data)  # it refuses assignment, and holds our wrapper
        if self.init is not None:
            self.init(worker)


class MapLoads(Dataset[Loaded]):
    """A map-style dataset of whose samples each request makes one local batch."""

    def __init__(self, data: Any, collate: Collate, seed: int, *, whole: bool, split: Split | None) -> None:
        self.data, self.collate, self.seed, self.whole, self.split = data, collate, seed, whole, split
        self._epoch: int | None = None

    def __getitem__(self, request: Request) -> Loaded:
        try:
            with use_random_stream(0):
                self._set_epoch(request.position.epoch)
                return self._whole(request) if self.whole else self._samples(request)
        except Exception as error:
            return in_place(error, request.position)

    def _set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:  # here and not at the start of the epoch: persistent workers have copies of the dataset
            self._epoch = epoch
            set_epoch(self.data, epoch)

    def _samples(self, request: Request) -> Loaded:
        epoch = request.position.epoch
        made: dict[int, Any] = {}
        for number, indices, repeats in request.runs:
            samples = self._visit(indices, repeats, epoch)
            seed = visit_seed(self.seed, "collate", epoch, indices[0], repeats[0])
            made[number] = _collated(self.collate, samples, seed, number, request.position)
        return Loaded(request.position, request.sizes, made)

    def _visit(self, indices: list[Any], repeats: list[int], epoch: int) -> list[Any]:
        """Return the samples at `indices`, each loaded with the generators seeded by its index."""
        samples: list[Any] = []
        with Noting(lambda: f"while loading sample {indices[len(samples)]} of epoch {epoch}"):
            for index, repeat in zip(indices, repeats, strict=True):
                reseed(visit_seed(self.seed, "sample", epoch, index, repeat))
                samples.append(self.data[index])
        return samples

    def _whole(self, request: Request) -> Loaded:
        epoch, (_, (index,), (repeat,)) = request.position.epoch, request.runs[0]
        with Noting(lambda: f"while loading batch {index} of epoch {epoch}"):
            reseed(visit_seed(self.seed, "sample", epoch, index, repeat))
            batch = self.collate(self.data[index])
            local = cut(batch, request.micro_batches, request.mine, request.position, self.split)
        return Loaded(local.position, local.sizes, dict(local.micro_batches))


@dataclass(frozen=True, kw_only=True)
class StreamLoads(IterableDataset[Loaded]):
    """One epoch of a stream from `start` on: all of it is gone through, and the owned micro-batches are collated."""

    data: Any
    collate: Collate
    seed: int
    batch_size: int | None
    drop_last: bool
    split: Split | None
    start: Position
    micro_batches: int
    mine: range

    def __iter__(self) -> Iterator[Loaded]:
        try:
            yield from self._loads()
        except Exception as error:
            yield in_place(error, self.start)

    def _loads(self) -> Iterator[Loaded]:
        epoch, size = self.start.epoch, self.batch_size or 1
        with use_random_stream(stream_seed(self.seed, "stream", epoch)), Noting(lambda: f"while starting epoch {epoch}"):
            set_epoch(self.data, epoch)
            stream = iter(self.data() if callable(self.data) and not hasattr(self.data, "__iter__") else self.data)
        batch = 0
        while True:
            with use_random_stream(0):
                items = self._take(stream, batch * size, size)
                loaded = None
                full = len(items) == size
                if items and (full or not self.drop_last) and batch >= self.start.batch:
                    loaded = self._make(items, Position(epoch, batch))
            if not items and batch < max(self.start.batch, 1):
                raise UsageError(
                    f"the data ended after {batch} batches in epoch {epoch}, where {self.start} was asked for: give "
                    f"data that yields at least one item and the same in every run, and start within it"
                )
            if loaded is not None:
                yield loaded  # outside of the random stream: the consumer's generators are its own
            if not full:
                return
            batch += 1

    def _take(self, stream: Iterator[Any], first: int, number: int) -> list[Any]:
        """Return the next `number` items of the stream, fewer at its end; item `first` of the epoch is the first."""
        epoch = self.start.epoch
        items: list[Any] = []
        thing = "sample" if self.batch_size else "batch"
        with Noting(lambda: f"while loading {thing} {first + len(items)} of epoch {epoch}"):
            for offset in range(number):
                reseed(visit_seed(self.seed, "sample", epoch, first + offset))
                item = next(stream, self)  # this object itself marks the end: no stream can yield it
                if item is self:
                    break
                items.append(item)
        return items

    def _make(self, items: list[Any], position: Position) -> Loaded:
        """Return the owned part of the global batch that `items` are."""
        if self.batch_size is None:
            with Noting(lambda: f"while cutting batch {position.batch} of epoch {position.epoch}"):
                local = cut(self.collate(items[0]), self.micro_batches, self.mine, position, self.split)
            return Loaded(position, local.sizes, dict(local.micro_batches))
        sizes = even_sizes(len(items), self.micro_batches)
        made: dict[int, Any] = {}
        for number, start, stop in bounds(sizes, self.mine):
            seed = visit_seed(self.seed, "collate", position.epoch, position.batch * self.batch_size + start)
            made[number] = _collated(self.collate, items[start:stop], seed, number, position)
        return Loaded(position, sizes, made)


def _collated(collate: Collate, samples: list[Any], seed: int, number: int, position: Position) -> Batch:
    """Return one micro-batch made of its samples."""
    with Noting(lambda: f"while collating micro-batch {number} of batch {position.batch} of epoch {position.epoch}"):
        reseed(seed)
        return collate(samples)


def set_epoch(data: Any, epoch: int) -> None:
    """Tell a dataset or sampler which epoch it is, if it has a method for that."""
    tell = getattr(data, "set_epoch", None)
    if callable(tell):
        tell(epoch)
