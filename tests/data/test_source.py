"""The same global batches under every layout, from any position, with any number of loader workers."""

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from paceline.data import Position, Source, digest, epoch_order, even_sizes, global_batches
from paceline.data.local import LocalBatch
from paceline.errors import UsageError


class Noisy(Dataset):
    """Samples that draw from all three generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(2), "np": np.random.rand(), "py": random.random()}


class NoisyStream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(11):
            yield {"index": index + 100 * self.epoch, "noise": torch.rand(2), "np": np.random.rand(), "py": random.random()}


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.second = second


class Failing(Noisy):
    kind: type = ValueError

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise Odd(1, 2) if self.kind is Odd else self.kind("bad sample")
        return super().__getitem__(index)


def padded(samples: list[int]) -> torch.Tensor:
    """A collate function whose result depends on what is collated together, and on chance."""
    return torch.tensor([[sample, max(samples), len(samples), torch.randint(1000, ()).item()] for sample in samples])


def run(source: Source, micro_batches: int = 1, mine: range | None = None, start: Position | None = None) -> list[LocalBatch]:
    share = range(micro_batches) if mine is None else mine
    return list(source.batches(start or Position(), micro_batches=micro_batches, mine=share))


def shares(micro_batches: int, replicas: int) -> list[range]:
    sizes = even_sizes(micro_batches, replicas)
    return [range(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(replicas)]


def contents(locals_: list[LocalBatch]) -> list[tuple[Any, ...]]:
    return [(local.position, local.sizes, {n: digest(b) for n, b in sorted(local.micro_batches.items())}) for local in locals_]


def merged(parts: list[list[LocalBatch]]) -> list[LocalBatch]:
    out = []
    for group in zip(*parts, strict=True):
        assert len({(local.position, local.sizes) for local in group}) == 1
        together = {number: batch for local in group for number, batch in local.micro_batches.items()}
        out.append(LocalBatch(group[0].position, group[0].sizes, together))
    return out


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 13),
    micro_batches=st.integers(1, 6),
    replicas=st.integers(1, 4),
    epoch=st.integers(0, 3),
    stream=st.booleans(),
    data=st.data(),
)
def test_any_layout_and_any_start_give_the_same_micro_batches(
    count: int, batch_size: int, micro_batches: int, replicas: int, epoch: int, stream: bool, data: st.DataObject
) -> None:
    def source() -> Source:
        samples: Any = itertools.chain(range(count)) if stream and epoch == 0 else range(count) if stream else list(range(count))
        if stream and epoch:
            samples = generate
        return Source(samples, batch_size=batch_size, seed=3, collate=padded)

    def generate() -> Iterator[int]:
        yield from range(count)

    whole = run(source(), micro_batches, start=Position(epoch))
    parts = [run(source(), micro_batches, share, Position(epoch)) for share in shares(micro_batches, replicas)]
    assert contents(merged(parts)) == contents(whole)
    seen = [row for local in whole for number in sorted(local.micro_batches) for row in local.micro_batches[number][:, 0].tolist()]
    expected = list(range(count)) if stream else epoch_order(count, seed=3, epoch=epoch, shuffle=True).tolist()
    assert seen == expected
    start = Position(epoch, data.draw(st.integers(0, len(whole) - 1)))
    assert contents(run(source(), micro_batches, start=start)) == contents(whole[start.batch :])
    batches = global_batches(np.arange(count), batch_size, drop_last=False)
    assert [local.rows for local in whole] == [len(batch) for batch in batches]


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = [tuple(epoch_order(20, seed=seed, epoch=epoch, shuffle=True)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    # Written down: a new version of numpy or of this package must not change the order of a run that is resumed.
    assert epoch_order(8, seed=0, epoch=0, shuffle=True).tolist() == [4, 6, 5, 7, 0, 3, 2, 1]


@pytest.mark.parametrize("data", [Noisy(11), NoisyStream()], ids=["map", "stream"])
def test_augmentation_is_the_same_with_any_number_of_workers(data: Any) -> None:
    runs = []
    for workers in (0, 1, 2) if isinstance(data, Noisy) else (0, 1):
        torch.manual_seed(workers)
        source = Source(data, batch_size=4, seed=1, num_workers=workers)
        runs.append(contents(run(source, 3, start=Position(2)) + run(source, 3, start=Position(3))))
    assert all(other == runs[0] for other in runs)
    assert runs[0][0] != runs[0][3]


def test_augmentation_does_not_depend_on_the_batch() -> None:
    def noise(batch_size: int, micro_batches: int) -> dict[int, list[float]]:
        found = {}
        for local in run(Source(Noisy(9), batch_size=batch_size, seed=1), micro_batches):
            for batch in local.micro_batches.values():
                found |= dict(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))
        return found

    assert noise(4, 2) == noise(9, 1) == noise(1, 1)
    assert len({tuple(row) for row in noise(4, 2).values()}) == 9


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [Noisy(6), NoisyStream()], ids=["map", "stream"])
def test_the_callers_generators_are_untouched(data: Any, workers: int) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    loader = DataLoader(data, batch_size=2, num_workers=workers, shuffle=None if isinstance(data, IterableDataset) else True)
    for _ in Source(loader, seed=0).batches(Position(), micro_batches=2, mine=range(2)):
        assert (torch.get_rng_state() == states[0]).all()
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


def test_the_consumers_draws_do_not_reach_the_samples() -> None:
    def noises(disturb: bool) -> list[Any]:
        out = []
        for local in Source(NoisyStream(), batch_size=3, seed=0).batches(Position(), micro_batches=1, mine=range(1)):
            out.append(digest(local.micro_batches[0]))
            if disturb:
                torch.rand(1)
        return out

    assert noises(True) == noises(False)


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_is_left_behind(persistent: bool) -> None:
    loader = DataLoader(Noisy(20), batch_size=2, num_workers=2, persistent_workers=persistent)
    source = Source(loader, seed=0)
    whole = contents(run(source))
    assert len(multiprocessing.active_children()) == (2 if persistent else 0)
    iterator = source.batches(Position(), micro_batches=1, mine=range(1))
    next(iterator)
    assert multiprocessing.active_children()
    iterator.close()
    assert not multiprocessing.active_children()
    assert contents(run(source)) == whole
    assert contents(run(source, start=Position(1, 4))) == contents(run(source, start=Position(1)))[4:]
    source.close()
    assert not multiprocessing.active_children()


def test_two_epochs_of_a_source_with_persistent_workers_may_overlap() -> None:
    source = Source(DataLoader(Noisy(8), batch_size=2, num_workers=1, persistent_workers=True), seed=0)
    alone = contents(run(source))
    both = [source.batches(Position(), micro_batches=1, mine=range(1)) for _ in range(2)]
    pairs = list(zip(*both, strict=True))
    assert contents([pair[0] for pair in pairs]) == contents([pair[1] for pair in pairs]) == alone
    source.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ValueError, KeyError, Odd, IndexError])
def test_an_exception_keeps_its_type_and_says_which_sample(kind: type, workers: int) -> None:
    data = Failing(9)
    data.kind = kind
    source = Source(data, batch_size=2, seed=0, shuffle=False, num_workers=workers)
    with pytest.raises(kind) as caught:
        run(source, start=Position(2))
    assert type(caught.value) is kind
    assert "while loading sample 5 of epoch 2" in caught.value.__notes__
    assert kind is not Odd or caught.value.second == 2
    assert not multiprocessing.active_children()


def test_a_local_exception_type_does_not_hang_the_consumer() -> None:
    class Local(Exception):
        pass

    data = Failing(9)
    data.kind = Local
    with pytest.raises(RuntimeError, match="Local: bad sample") as caught:
        run(Source(data, batch_size=2, seed=0, num_workers=1))
    assert "while loading sample 5 of epoch 0" in caught.value.__notes__


def test_stop_iteration_does_not_end_the_epoch_early() -> None:
    data = Failing(9)
    data.kind = StopIteration
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        run(Source(data, batch_size=2, seed=0))
    assert "while loading sample 5 of epoch 0" in caught.value.__notes__


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_stream_or_a_collate_says_where(workers: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(Source(failing_stream, batch_size=2, seed=0, num_workers=workers))
    assert "while loading sample 3 of epoch 0" in caught.value.__notes__
    with pytest.raises(TypeError) as wrong:
        run(Source([object()] * 4, batch_size=2, seed=0, num_workers=workers), 2)
    assert "while collating micro-batch 0 of batch 0 of epoch 0" in wrong.value.__notes__


def failing_stream() -> Iterator[float]:
    for index in (3, 2, 1, 0):
        yield 1 / index


class Backwards(Sampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([9 - self.epoch, 0])

    def __len__(self) -> int:
        return 2


def indices(locals_: list[LocalBatch]) -> list[int]:
    return [index for local in locals_ for batch in local.micro_batches.values() for index in batch["index"].tolist()]


def test_loaders_keep_their_order() -> None:
    data = Noisy(10)
    assert indices(run(Source(DataLoader(data, batch_size=3), seed=5), 2)) == list(range(10))
    shuffled = Source(DataLoader(data, batch_size=3, shuffle=True), seed=5)
    assert indices(run(shuffled)) == epoch_order(10, seed=5, epoch=0, shuffle=True).tolist()
    assert indices(run(Source(DataLoader(data, batch_size=3, shuffle=True), seed=5, shuffle=False))) == list(range(10))
    assert indices(run(Source(DataLoader(data, batch_size=2, sampler=Backwards()), seed=5), start=Position(4))) == [5, 0]
    assert len(Source(DataLoader(data, batch_size=3, drop_last=True), seed=5)) == 3
    assert len(Source(DataLoader(data, batch_size=3, drop_last=True), seed=5, drop_last=False)) == 4


def test_random_samplers_depend_on_seed_and_epoch_only() -> None:
    data = Noisy(10)
    for own in (None, torch.Generator()):
        for sampler in (SubsetRandomSampler(range(1, 8), own), WeightedRandomSampler([1.0] * 10, 30, generator=own)):
            source = Source(DataLoader(data, batch_size=4, sampler=sampler), seed=5)
            second = contents(run(source, start=Position(1)))
            run(source, start=Position(0))
            torch.rand(1)
            assert contents(run(source, start=Position(1))) == second
            assert second != contents(run(source, start=Position(2)))


def test_visits_of_one_sample_in_an_epoch_are_augmented_unlike() -> None:
    loader = DataLoader(Noisy(2), batch_size=4, sampler=[0, 0, 1, 0])
    (local,) = run(Source(loader, seed=0))
    assert len({tuple(row) for row in local.micro_batches[0]["noise"].tolist()}) == 4


def test_a_batch_sampler_decides_the_batches() -> None:
    loader = DataLoader(Noisy(10), batch_sampler=[[1, 2, 3], [4], [9, 8]])
    source = Source(loader, seed=0)
    locals_ = run(source, 2)
    assert [local.sizes for local in locals_] == [(2, 1), (1, 0), (1, 1)]
    assert indices(locals_) == [1, 2, 3, 4, 9, 8]
    assert len(source) == 3
    assert source.batch_size is None
    own = BatchSampler(SubsetRandomSampler(range(9), torch.Generator()), 4, True)
    assert len(run(Source(DataLoader(Noisy(9), batch_sampler=own), batch_size=4, seed=0))) == 2


class WholeBatches(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((5, 2), float(index)), "noise": torch.rand(5)}


def whole_stream() -> Iterator[dict[str, torch.Tensor]]:
    yield from (WholeBatches()[index] for index in range(3))


class WholeStream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return whole_stream()


@pytest.mark.parametrize("data", [WholeBatches(), WholeStream()], ids=["map", "stream"])
def test_whole_batches_are_cut(data: Any) -> None:
    runs = []
    for workers in (0, 1):
        source = Source(DataLoader(data, batch_size=None, num_workers=workers), seed=0)
        locals_ = run(source, 3)
        assert [local.sizes for local in locals_] == [(2, 2, 1)] * 3
        assert contents(merged([run(source, 3, share) for share in shares(3, 2)])) == contents(locals_)
        assert contents(run(source, 3, start=Position(0, 2))) == contents(locals_[2:])
        runs.append(contents(locals_))
    assert runs[0] == runs[1]


def test_many_kinds_of_data_are_understood() -> None:
    x = torch.arange(10)
    for data in (x, x.numpy(), x.tolist(), TensorDataset(x), (x, x), range(10)):
        source = Source(data, batch_size=4, seed=0, drop_last=True)
        assert (len(source), source.num_samples) == (2, 10)
        assert [local.rows for local in run(source)] == [4, 4]
    stream = Source(iter(range(10)), batch_size=4, seed=0, drop_last=True)
    assert stream.num_batches is None
    assert [local.rows for local in run(stream)] == [4, 4]
    with pytest.raises(UsageError, match="gone through only once"):
        run(stream)
    with pytest.raises(TypeError, match="not known beforehand"):
        len(stream)


def test_set_epoch_reaches_streams() -> None:
    assert indices(run(Source(NoisyStream(), batch_size=20, seed=0), start=Position(2)))[:2] == [200, 201]


def remember(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.count = 7  # as torch's documentation shows it: the user's own dataset


class Counting(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"count": self.count}


def test_worker_init_fn_finds_the_users_dataset() -> None:
    source = Source(DataLoader(Counting(4), batch_size=4, num_workers=1, worker_init_fn=remember), seed=0)
    assert run(source)[0].micro_batches[0]["count"].tolist() == [7] * 4


def test_micro_batches_start_at_64_bytes() -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        memory = np.zeros(100, dtype=np.uint8)
        offset = -memory.ctypes.data % 64 + 16
        return {"x": torch.from_numpy(memory[offset : offset + len(samples)])}

    for local in run(Source(list(range(9)), batch_size=4, seed=0, collate=collate), 2):
        assert all(batch["x"].data_ptr() % 64 == 0 for batch in local.micro_batches.values())


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "list that was given as data is empty"),
        ([1], {"batch_size": 0}, "batch_size=0 was given: allowed is an integer of 1 or more"),
        ([1], {"batch_size": None}, "no batch_size was given"),
        ([1], {"drop_last": True}, "fewer than batch_size=2, and drop_last=True drops them all"),
        ([1], {"num_workers": -1}, "num_workers=-1"),
        ({"x": 1}, {}, "a dict was given as data"),
        (3, {}, "a int was given as data: allowed are"),
        ((torch.ones(2), torch.ones(3)), {}, r"a tuple of tensors with \[2, 3\] rows"),
        (NoisyStream(), {"num_workers": 2}, "num_workers=2 was given for data that is iterated.*num_workers=1"),
        (NoisyStream(), {"shuffle": True}, "shuffle=True was given for data that is iterated"),
        (DataLoader(Noisy(4), batch_size=4), {}, "batch_size=2 was given with a DataLoader of batch_size=4"),
        (DataLoader(Noisy(4), batch_size=2), {"collate": padded}, "give it to the loader, as collate_fn"),
        (DataLoader(Noisy(4), batch_size=2), {"num_workers": 3}, "DataLoader of num_workers=0"),
        (DataLoader(Noisy(4), batch_size=2, sampler=Backwards()), {"shuffle": True}, "Backwards, which decides the order"),
        (
            DataLoader(Noisy(4), batch_size=2, sampler=DistributedSampler(Noisy(4), 2, 0)),
            {},
            "the data is split by paceline, pass the plain dataset or loader",
        ),
    ],
)
def test_data_that_cannot_be_used_is_refused(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Source(data, **({"batch_size": 2, "seed": 0} | options))


def test_positions_beyond_the_data_are_refused() -> None:
    source = Source([1, 2, 3], batch_size=2, seed=0)
    assert run(source, start=Position(0, 2)) == []
    with pytest.raises(UsageError, match="epoch 0 has 2 batches: start at batch 0 to 2"):
        run(source, start=Position(0, 3))
    with pytest.raises(UsageError, match="ended after 0 batches"):
        run(Source(iter(()), batch_size=2, seed=0))
    with pytest.raises(UsageError, match="count from 0"):
        Position(-1, 0)
    with pytest.raises(UsageError, match="micro_batches=0"):
        run(source, 0)
