"""The user's own loop: batches, resuming, modes of the caller, failures, and what is left behind."""

from __future__ import annotations

import _thread
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Job, PacelineError, PlanError, Trainer, UsageError
from tests.promises.models import assert_close, classes, cross_entropy, dataset, features, job, mlp, run, sgd

PLANS = ["replicas=1,micro_batches=4", "replicas=2,micro_batches=4", "replicas=3,micro_batches=4,reproducible=true"]


@pytest.mark.parametrize("plan", PLANS)
def test_going_on_after_a_break_repeats_and_drops_nothing(plan: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append((trainer.steps_done, sorted(batch[0][:, 0].tolist())))
        return model(batch[0]).square().mean()

    def rows_by_step() -> list[list[float]]:
        steps = sorted({step for step, _ in seen})
        return [sorted(row for step, rows in seen if step == wanted for row in rows) for wanted in steps]

    data = torch.utils.data.TensorDataset(torch.arange(23.0).view(23, 1))
    seen: list[tuple[int, list[float]]] = []
    with Trainer(job(nn.Linear(1, 1), loss=loss, data=data, batch_size=5), plan, timeout_s=20) as trainer:
        for batch in trainer.batches(epochs=2):
            trainer.step(batch)
    whole, seen = rows_by_step(), []
    with Trainer(job(nn.Linear(1, 1), loss=loss, data=data, batch_size=5), plan, timeout_s=20) as trainer:
        for stop in (2, 3, 3, 7, 99):
            for batch in trainer.batches(epochs=2):
                if trainer.steps_done == stop:
                    break  # this batch was not trained on
                trainer.step(batch)
                if trainer.steps_done == 8:
                    break
    assert rows_by_step() == whole[: len(rows_by_step())]
    assert len(whole) == len(rows_by_step()) == 10 or len(rows_by_step()) == 8


def test_fit_goes_on_from_where_training_stands() -> None:
    whole = run(job(), "replicas=2", steps=5)
    with Trainer(job(), "replicas=2", timeout_s=20) as trainer:
        losses: list[float] = []
        trainer.fit(steps=2, loggers=[lambda report: losses.append(report.loss)])
        report = trainer.fit(steps=5, loggers=[lambda report: losses.append(report.loss)])
        assert report is not None
        assert report.step == 5
        assert trainer.fit(steps=5) is None
    assert losses == whole.losses


def test_fit_with_evaluate_every_0_is_refused() -> None:
    with Trainer(job(held_out=dataset(4))) as trainer, pytest.raises(UsageError, match="evaluate_every"):
        trainer.fit(steps=2, evaluate_every=0)


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    note: str = "same for all"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "nested"])
def test_the_users_own_batches_of_any_kind_train_alike(plan: str, kind: str) -> None:
    make: Any
    make, take = {
        "tuple": (lambda x, y: (x, y), lambda b: b),
        "dict": (lambda x, y: {"x": x, "y": y, "scale": 2.0}, lambda b: (b["x"], b["y"])),
        "dataclass": (Pair, lambda b: (b.x, b.y)),
        "nested": (lambda x, y: {"in": [x], "out": {"y": (y, None)}}, lambda b: (b["in"][0], b["out"]["y"][0])),
    }[kind]
    results = []
    for one in (plan, "replicas=1,micro_batches=4"):
        made = job(loss=lambda m, b: cross_entropy(m, take(b)), data=None, batch_size=None)
        with Trainer(made, one, timeout_s=20) as trainer:
            results.append([trainer.step(make(features(13, seed), classes(13, seed))).loss for seed in (1, 2, 3)])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_tensor_that_is_split_elsewhere_than_along_dimension_0() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch["x"].T, batch["y"]))

    losses = []
    for plan in PLANS:
        with Trainer(job(loss=loss, data=None, batch_size=None, split={"x": 1}), plan, timeout_s=20) as trainer:
            losses.append(trainer.step({"x": features(13).T.contiguous(), "y": classes(13)}).loss)
    with torch.no_grad():
        assert losses == pytest.approx([float(cross_entropy(mlp(), (features(13), classes(13))))] * 3)


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_without_gradients_is_refused(plan: str) -> None:
    trainer = Trainer(job(), plan, timeout_s=20)
    with trainer, torch.no_grad(), pytest.raises(UsageError, match="gradients are off"):
        trainer.step((features(8), classes(8)))


@pytest.mark.parametrize("plan", PLANS)
def test_the_callers_autocast_reaches_every_worker(plan: str) -> None:
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output.float(), batch[1])

    with Trainer(job(loss=loss), plan, timeout_s=20) as trainer:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            trainer.step((features(8), classes(8)))
        assert seen == [torch.bfloat16] * 4
        trainer.step((features(8), classes(8)))
        assert seen[4:] == [torch.float32] * 4


@pytest.mark.parametrize("plan", PLANS)
def test_closing_leaves_no_thread_and_torchs_setting(plan: str) -> None:
    threads, setting = threading.active_count(), torch.get_num_threads()
    run(job(intra_op_threads=1), plan, steps=1)
    assert (threading.active_count(), torch.get_num_threads()) == (threads, setting)


@pytest.mark.parametrize("plan", PLANS)
def test_a_closed_trainer_says_so(plan: str) -> None:
    """It must not wait: the threads that would do the work have ended."""
    trainer = Trainer(job(), plan, timeout_s=3)
    trainer.close()
    trainer.close()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            trainer.step((features(8), classes(8)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(6)
    assert not thread.is_alive(), "a step of a closed trainer hangs"
    assert isinstance(errors[0], PacelineError)
    assert "close" in str(errors[0])


@pytest.mark.parametrize("plan", PLANS)
def test_a_failure_keeps_its_type_and_says_where(plan: str) -> None:
    class Planted(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} {two}")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 99).any():
                raise Planted(1, 2)
            return x

    model = nn.Sequential(Layer(), mlp())
    batch = (features(8), classes(8))
    with Trainer(job(model), plan, timeout_s=20) as trainer:
        trainer.step(batch)
        batch[0][7] = 99
        before = [parameter.detach().clone() for parameter in model.parameters()]
        began = time.monotonic()
        with pytest.raises(Planted) as caught:
            trainer.step(batch)
        assert time.monotonic() - began < 3
    rank = trainer.size - 1
    assert f"rank {rank}, step 2, micro-batch 3, forward of 0" in caught.value.__notes__
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline")]


def test_after_a_failure_on_threads_the_trainer_refuses_to_go_on() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("planted")

    with Trainer(job(loss=loss), "replicas=2", timeout_s=20) as trainer:
        with pytest.raises(ValueError, match="planted"):
            trainer.step((features(8), classes(8)))
        with pytest.raises(PacelineError, match=r"stopped at an earlier failure.*planted.*make a new Trainer"):
            trainer.step((features(8), classes(8)))


def test_an_optimizer_that_raises_ends_every_worker() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no update")

    with Trainer(job(optimizer=lambda named: Failing(named, lr=0.1)), "replicas=3", timeout_s=20) as trainer:
        began = time.monotonic()
        with pytest.raises(ValueError, match="no update") as caught:
            trainer.step((features(8), classes(8)))
        assert time.monotonic() - began < 3
    assert "rank 0, step 1, update" in caught.value.__notes__


@pytest.mark.parametrize("plan", ["replicas=2,micro_batches=4", "replicas=3,micro_batches=4,reproducible=true"])
def test_ctrl_c_ends_every_worker(plan: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if started.acquire(blocking=False):
            _thread.interrupt_main()
        time.sleep(0.1)
        return cross_entropy(model, batch)

    started = threading.Semaphore(1)
    with Trainer(job(loss=loss), plan, timeout_s=20) as trainer:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            trainer.step((features(8), classes(8)))
        assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("paceline")]


class Broken(torch.utils.data.Dataset[Any]):
    """Raises at one sample."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        if index == 20:
            raise IndexError("sample 20 cannot be read")
        return features(26)[index], classes(26)[index]


@pytest.mark.parametrize("plan", PLANS)
def test_an_index_error_of_a_dataset_is_no_end_of_the_epoch(plan: str) -> None:
    with Trainer(job(data=Broken(), shuffle=False), plan, timeout_s=20) as trainer:
        with pytest.raises(IndexError, match="sample 20 cannot be read") as caught:
            trainer.fit(epochs=1)
        assert trainer.steps_done == 1
    assert "while loading sample 20 of epoch 0" in caught.value.__notes__


def test_more_replicas_than_rows_are_refused() -> None:
    trainer = Trainer(job(batch_size=3), "replicas=4")
    with trainer, pytest.raises(UsageError, match=r"replicas=4 needs at least 4 rows in a batch, got batch_size=3"):
        next(iter(trainer.batches(epochs=1)))


def test_stages_are_refused_by_this_version() -> None:
    with pytest.raises(PlanError, match="stages=2: this version does not cut models yet; pass stages=1"):
        Trainer(job(), "stages=2,micro_batches=4")


def test_processes_are_refused_in_a_process_that_is_alone() -> None:
    with pytest.raises(UsageError, match=r"transport='processes' needs worker processes, and this one is alone.*torchrun"):
        Trainer(job(), "replicas=2", transport="processes")


def test_neither_epochs_nor_steps_is_refused() -> None:
    with Trainer(job()) as trainer, pytest.raises(UsageError, match="how long to train is not said"):
        trainer.batches()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), "5"])
def test_a_wait_without_an_end_is_refused(timeout_s: Any) -> None:
    with pytest.raises(UsageError, match="not a number of seconds above 0"):
        Trainer(job(), timeout_s=timeout_s)


def test_a_lazy_model_that_has_seen_nothing_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"the parameter '0.weight' of a lazy module has no shape yet; run one forward"):
        Trainer(job(model), "replicas=2")


def test_a_function_that_builds_the_model_gets_the_jobs_stream() -> None:
    def make() -> nn.Module:
        return nn.Linear(6, 3)

    states = []
    for number in range(2):
        torch.manual_seed(number)
        with Trainer(Job(model=make, loss=cross_entropy, optimizer=sgd), "replicas=2") as trainer:
            states.append(trainer.model.weight.detach().clone())
    assert torch.equal(states[0], states[1])


def test_a_loss_that_is_not_one_element_is_refused() -> None:
    trainer = Trainer(job(loss=lambda m, b: m(b[0])), "replicas=2", timeout_s=20)
    with trainer, pytest.raises(UsageError, match=r"loss returned a tensor of shape \(4, 3\); return a mean, \(sum, count\)"):
        trainer.step((features(8), classes(8)))


def test_a_loss_of_shape_1_is_one_element() -> None:
    assert_close(run(job(loss=lambda m, b: cross_entropy(m, b).reshape(1)), "replicas=2"), run(job(), "replicas=2"))
