"""A run that stops anywhere and goes on under any number of replicas is the run that did not stop."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from paceline import Trainer
from paceline.checkpoint import Checkpoints
from tests.resume.runs import BATCH, STEPS, Noisy, Ran, assert_same, copied, job, plan, take, uninterrupted


@functools.cache
def reference() -> Ran:
    return uninterrupted(job())


@settings(max_examples=14, deadline=None, derandomize=True, database=None)
@given(stops=st.lists(st.integers(1, STEPS - 1), max_size=4, unique=True).map(sorted), data=st.data())
def test_stopping_anywhere_and_going_on_under_any_layout_changes_nothing(stops: list[int], data: Any) -> None:
    """Within an epoch and between two; every layout is another one. Kinds C1, C2, C4, C5, C14, H1, H2, H4, H5, H8."""
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for stop in [*stops, STEPS]:
            replicas = data.draw(st.integers(1, 4), label="replicas")
            with Trainer(job(), plan(replicas), timeout_s=20) as trainer:
                found = trainer.resume(folder)
                assert (found is not None) == bool(losses)
                losses += take(trainer, stop)
                trainer.save(folder)
                state = copied(trainer.model)
    assert losses == reference().losses
    assert_same(state, reference().state)


def test_saving_again_and_again_saves_what_is_there_now(tmp_path: Any) -> None:
    """Three uneven replicas; nothing is remembered from an earlier save, nor by it. Kind C16."""
    with Trainer(job(), plan(3), timeout_s=20) as trainer:
        take(trainer, 2)
        trainer.save(tmp_path)
        take(trainer, 5)
        trainer.save(tmp_path)
        trainer.save(tmp_path)
        take(trainer, 7)
        ahead = copied(trainer.model)
    assert [path.name for path in Checkpoints(tmp_path).list()] == ["step-00000002", "step-00000005.1"]
    with Trainer(job(), plan(2), timeout_s=20) as trainer:
        trainer.resume(tmp_path)
        take(trainer, 7)
        assert_same(copied(trainer.model), ahead)


@pytest.mark.parametrize("replicas", [2, 3])
def test_moments_come_back_to_the_last_bit(tmp_path: Any, replicas: int) -> None:
    """Saved under one layout, loaded under another, saved again: the same file. Kinds H5, H7."""
    with Trainer(job(), plan(1), timeout_s=20) as trainer:
        take(trainer, 3)
        first = trainer.save(tmp_path / "first")
    with Trainer(job(), plan(replicas), timeout_s=20) as trainer:
        remarks = trainer.load(first)
        second = trainer.save(tmp_path / "second")
    assert remarks == [f"saved under {full_plan(1)}, goes on under {full_plan(replicas)}"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def full_plan(replicas: int) -> str:
    return f"replicas={replicas},micro_batches=4,reproducible=true"


def test_tied_weights_stay_tied(tmp_path: Any) -> None:
    """Both names move together after resuming, on every replica. Kind C14."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.head.weight = self.up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.tanh(self.up(x)))[:, :3]
            return out

    expected = uninterrupted(job(model=Tied, steps=6))
    with Trainer(job(model=Tied), plan(2), timeout_s=20) as trainer:
        take(trainer, 3, total=6)
        trainer.save(tmp_path)
    with Trainer(job(model=Tied), plan(4), timeout_s=20) as trainer:
        trainer.resume(tmp_path)
        take(trainer, 6, total=6)
        assert trainer.model.get_parameter("head.weight") is trainer.model.get_parameter("up.weight")
        assert_same(copied(trainer.model), expected.state)


class Seen:
    """Collates and says which rows a run was given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def of(self, batch: Any) -> None:
        for _, micro_batch in sorted(batch.micro_batches.items()):
            self.rows += micro_batch[1].tolist()


class Numbered(Noisy):
    """Rows that tell their number instead of a class."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], index


def numbered_loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(batch[0]).square().mean()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_fetches_ahead_repeats_and_drops_nothing(tmp_path: Any, workers: int) -> None:
    """The batches that were fetched and not trained on come again, and no others. Kinds C1, C2, C4, C5, H8."""
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True, num_workers=workers, prefetch_factor=3 if workers else None)
    seen, whole = Seen(), Seen()
    of = job(data=loader, batch_size=None, loss=numbered_loss, steps=8)
    with Trainer(of, plan(2), timeout_s=20) as trainer:
        for batch in trainer.batches():
            whole.of(batch)
            trainer.step(batch)
        expected = copied(trainer.model)
    for replicas, stop in ((2, 2), (1, 5), (4, 8)):
        with Trainer(of, plan(replicas), timeout_s=20) as trainer:
            trainer.total_steps = 8
            trainer.resume(tmp_path)
            for batch in trainer.batches(steps=stop):
                seen.of(batch)
                trainer.step(batch)
            trainer.save(tmp_path)
            state = copied(trainer.model)
    assert seen.rows == whole.rows
    assert [sorted(seen.rows[:47]), sorted(seen.rows[47:])] == [list(range(47))] * 2
    assert_same(state, expected)
