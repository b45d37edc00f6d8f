"""Which samples an epoch visits, batch by batch, and the requests that are made of them for a loader."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.batch import even_sizes
from paceline.data.given import Given, samplers
from paceline.data.loading import Request, set_epoch
from paceline.data.local import bounds
from paceline.data.order import Indices, Position, count_batches, epoch_order
from paceline.errors import UsageError
from paceline.random_streams import stream_seed, use_random_stream


@dataclass(frozen=True)
class Order:
    """The samples of one epoch: batch `b` holds those from `edges[b]` to `edges[b + 1]`.

    `repeats` says of each sample how often it came before; None where none comes twice.
    """

    indices: Indices | list[Any]
    edges: Sequence[int]
    repeats: list[int] | None = None

    def __len__(self) -> int:
        return len(self.edges) - 1

    def run(self, start: int, stop: int) -> tuple[list[Any], list[int]]:
        """Return the indices and the repeats of a run of samples."""
        part = self.indices[start:stop]
        repeats = [0] * len(part) if self.repeats is None else self.repeats[start:stop]
        return part if isinstance(part, list) else part.tolist(), repeats


def order_of(given: Given, *, seed: int, epoch: int) -> Order:
    """Return the order of one epoch: that of the user's sampler, or our own."""
    size = given.batch_size or 1
    edges: Sequence[int]
    if given.sampler is None and given.batch_sampler is None:
        number = len(given.data)
        indices: Indices | list[Any] = epoch_order(number, seed=seed, epoch=epoch, shuffle=given.shuffle)
        return Order(indices, _edges(number, size, drop_last=given.drop_last))
    drawn = _draw(given, seed, epoch)
    if given.batch_sampler is not None:
        runs = [[_plain(index) for index in run] for run in drawn]
        if not all(runs):
            raise UsageError(f"the batch sampler yielded an empty batch in epoch {epoch}: every batch needs at least one sample")
        indices = [index for run in runs for index in run]
        edges = [0, *itertools.accumulate(len(run) for run in runs)]
    else:
        indices = [_plain(index) for index in drawn]
        edges = _edges(len(indices), size, drop_last=given.drop_last)
    if len(edges) < 2:
        name = type(given.batch_sampler if given.sampler is None else given.sampler).__name__
        raise UsageError(
            f"the {name} yielded {len(indices)} samples in epoch "
            f"{epoch}, not enough for one batch: give a sampler that yields more, or drop_last=False"
        )
    return Order(indices, edges, _repeats(indices))


def list_requests(order: Order, start: Position, micro_batches: int, mine: range, *, whole: bool) -> Iterator[Request]:
    """Yield one request for each global batch of the epoch from `start` on."""
    for batch in range(start.batch, len(order)):
        position = Position(start.epoch, batch)
        first, last = order.edges[batch], order.edges[batch + 1]
        if whole:
            yield Request(position, (), [(0, *order.run(first, last))], micro_batches, mine)
            continue
        sizes = even_sizes(last - first, micro_batches)
        runs = [(number, *order.run(first + begin, first + end)) for number, begin, end in bounds(sizes, mine)]
        yield Request(position, sizes, runs, micro_batches, mine)


def _edges(number: int, size: int, *, drop_last: bool) -> Sequence[int]:
    batches = count_batches(number, size, drop_last=drop_last)
    return [min(batch * size, number) for batch in range(batches + 1)]


def _draw(given: Given, seed: int, epoch: int) -> list[Any]:
    """Return all that the user's sampler yields in `epoch`, with every generator it may draw from seeded by (seed, epoch)."""
    sampler: Any = given.sampler if given.sampler is not None else given.batch_sampler
    involved = list(samplers(sampler))
    own = [each.generator for each in involved if isinstance(getattr(each, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in own]
    stream = stream_seed(seed, "sampler", epoch)
    with use_random_stream(stream):
        try:
            for generator in own:  # else the order would depend on how many epochs this process has seen
                generator.manual_seed(stream)
            for each in involved:
                set_epoch(each, epoch)
            return list(sampler)
        finally:
            for generator, state in zip(own, states, strict=True):
                generator.set_state(state)


def _plain(index: Any) -> Any:
    """Return an integer of numpy or torch as Python's, so that a dataset is asked alike whatever the sampler is."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _repeats(indices: list[Any]) -> list[int]:
    """Return how often each index came before, so that augmentation differs between the visits of one sample."""
    seen: dict[Any, int] = {}
    repeats = []
    for index in indices:
        key = index if isinstance(index, int | str) else repr(index)
        repeats.append(seen.get(key, 0))
        seen[key] = repeats[-1] + 1
    return repeats
