"""The same promises between real processes. One set of processes runs many cases, since starting torch takes seconds."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from paceline import Failure, Job, PeerError, Trainer
from tests.processes import Workers
from tests.promises.models import (
    CLASSES,
    MODELS,
    Ran,
    adamw,
    assert_identical,
    batchnorm,
    classes,
    cross_entropy,
    dataset,
    dropout,
    features,
    job,
    linear,
    mlp,
    run,
)

SECONDS = 9.0  # the longest that a failure may take to reach everybody; closing may wait 5 for data that is under way
REPRODUCIBLE = "micro_batches=5,reproducible=true"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def join(rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))


# What is the same on processes and on threads: functions of nothing that return values.


def trained(name: str) -> Ran:
    return run(job(MODELS[name], optimizer=adamw, clip_norm=0.5, count=lambda b: int((1 + b[1]).sum())), REPRODUCIBLE)


def noisy(module: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(module, (batch[0] * (1 + random.random()), batch[1]))


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    return float((predictions.argmax(1) == targets).float().mean())


def evaluated() -> Any:
    with Trainer(job(batchnorm, metrics={"function": accuracy}), REPRODUCIBLE, timeout_s=20) as trainer:
        reports = [trainer.evaluate(dataset(rows)) for rows in (1, 5, 27)]
        predictions = trainer.predict(dataset(14))
        return [(dict(report), report.rows) for report in reports], predictions


def own_batches() -> list[float]:
    with Trainer(job(data=None, batch_size=None), REPRODUCIBLE, timeout_s=20) as trainer:
        return [trainer.step((features(13, seed), classes(13, seed))).loss for seed in (1, 2)]


def resumed() -> list[float]:
    losses: list[float] = []
    with Trainer(job(dropout), REPRODUCIBLE, timeout_s=20) as trainer:
        for stop in (1, 2, 3):
            for batch in trainer.batches(epochs=2):
                losses.append(trainer.step(batch).loss)
                if trainer.steps_done == stop:
                    break
    return losses


def by_epochs() -> Any:
    made = job(
        scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
        scheduler_every="epoch",
    )
    with Trainer(made, REPRODUCIBLE, timeout_s=20) as trainer:
        reports = [trainer.step(batch) for batch in trainer.batches(epochs=3)]
        return [(report.lr, report.epoch, report.rows, report.loss) for report in reports]


def in_double_with_sync() -> Any:
    made = job(batchnorm().double(), sync_batchnorm=True, data=torch.utils.data.TensorDataset(features(26).double(), classes(26)))
    return run(made, "").state


ALIKE: dict[str, Callable[[], Any]] = {
    **{name: (lambda name=name: trained(name)) for name in MODELS},
    "noise of Python's generator": lambda: run(job(loss=noisy), REPRODUCIBLE),
    "evaluation": evaluated,
    "own batches": own_batches,
    "resuming": resumed,
    "by epochs": by_epochs,
}


def run_alike(rank: int, size: int, port: int) -> dict[str, Any]:
    join(rank, size, port)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name, case in ALIKE.items():
        try:
            results[name] = case()
        except BaseException:
            results[name] = traceback.format_exc()
            break
    results["left"] = (
        [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")],
        dist.is_initialized(),
    )
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module", params=[2, 3])
def alike(request: pytest.FixtureRequest, workers: Workers) -> list[dict[str, Any]]:
    results = workers.run(request.param, run_alike, free_port(), timeout_s=100)
    for result in results:
        assert not isinstance(result, BaseException), result
    return results


@pytest.mark.parametrize("name", ALIKE)
def test_processes_give_the_bits_of_one_worker(name: str, alike: list[dict[str, Any]]) -> None:
    reference = ALIKE[name]()
    for results in alike:
        assert not isinstance(results[name], str), results[name]
        if isinstance(reference, Ran):
            assert_identical(results[name], reference)
        elif name == "evaluation":
            assert results[name][0] == reference[0]
            assert torch.equal(results[name][1], reference[1])
        else:
            assert results[name] == reference


def test_trainers_leave_the_processes_as_they_were(alike: list[dict[str, Any]]) -> None:
    for results in alike:
        assert results["left"] == ([], True)


# What must end within seconds, on every rank, with the first failure.


def outcome(case: Callable[[int, int], Any], rank: int, size: int) -> tuple[float, Any, list[str]]:
    began = time.monotonic()
    result: Any
    try:
        result = case(rank, size)
    except PeerError as error:
        result = error.failure
    except BaseException as error:
        result = (type(error).__name__, str(error), list(getattr(error, "__notes__", [])))
    took = time.monotonic() - began
    return took, result, [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]


def fit(made: Any, plan: str = "") -> list[float]:
    with Trainer(made, plan, timeout_s=60) as trainer:
        return [trainer.step(batch).loss for batch in trainer.batches(epochs=1)]


def raising_loss(rank: int, size: int) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if rank == 1 and trainer.steps_done == 1:
            raise KeyError("planted")
        return cross_entropy(model, batch)

    with Trainer(job(loss=loss), "micro_batches=4", timeout_s=60) as trainer:
        for batch in trainer.batches(epochs=1):
            trainer.step(batch)


class Broken(torch.utils.data.Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        if self.rank == 1 and index == 24:
            raise IndexError("sample 24 cannot be read")
        return features(26)[index], classes(26)[index]


def raising_dataset(rank: int, size: int) -> Any:
    return fit(job(data=Broken(rank), shuffle=False))


def raising_dataset_in_a_loader(rank: int, size: int) -> Any:
    return fit(job(data=Broken(rank), shuffle=False, num_workers=1))


def raising_evaluation(rank: int, size: int) -> Any:
    def predict(model: nn.Module, batch: Any) -> Tensor:
        if rank == 1:
            raise KeyError("planted")
        return model(batch[0])

    with Trainer(job(predict=predict), timeout_s=60) as trainer:
        return trainer.predict(dataset(9))


def waiting(rank: int) -> None:
    """Stay alive with the trainer open, as a caller who catches the exception would."""
    time.sleep(SECONDS + 2)


def skipping(rank: int, size: int) -> Any:
    """One rank leaves out a batch, as code does that skips what it cannot use."""
    losses = []
    with Trainer(job(data=dataset(52), shuffle=False), timeout_s=60) as trainer:
        for number, batch in enumerate(trainer.batches(epochs=1)):
            if rank == 1 and number == 1:
                continue
            losses.append(trainer.step(batch).loss)
    return losses


def skipping_the_backward(rank: int, size: int) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if rank == 1 and trainer.steps_done == 1 and not failed:
            failed.append(True)
            raise MemoryError("planted")
        return cross_entropy(model, batch)

    failed: list[bool] = []
    with Trainer(job(loss=loss), timeout_s=60) as trainer:
        for batch in trainer.batches(epochs=2):
            try:
                trainer.step(batch)
            except MemoryError:
                continue


def other_batches(rank: int, size: int) -> Any:
    with Trainer(job(), timeout_s=60) as trainer:
        trainer.step((features(8, rank), classes(8)))


def other_rows(rank: int, size: int) -> Any:
    with Trainer(job(), timeout_s=60) as trainer:
        trainer.step((features(8 + rank), classes(8 + rank)))


def longer_dataset(rank: int, size: int) -> Any:
    with Trainer(job(data=dataset(26 + 13 * rank)), timeout_s=60) as trainer:
        for batch in trainer.batches(epochs=1):
            trainer.step(batch)
        if rank == 0:
            waiting(rank)


def longer_stream(rank: int, size: int) -> Any:
    def stream() -> Any:
        yield from dataset(26 + 13 * rank)

    return fit(job(data=stream))


def raising_metric(rank: int, size: int) -> Any:
    class Metric:
        def update(self, predictions: Any, targets: Any) -> None:
            raise KeyError("planted")

        def compute(self) -> float:
            return 0.0

    trainer = Trainer(job(metrics={"metric": Metric()}), timeout_s=60)
    try:
        trainer.evaluate(dataset(30))
    except KeyError:
        waiting(rank)
        raise


def raising_logger(rank: int, size: int) -> Any:
    def log(report: Any) -> None:
        raise OSError("disk full")

    trainer = Trainer(job(), timeout_s=60)
    try:
        trainer.fit(epochs=2, loggers=[log])
    except OSError:
        waiting(rank)
        raise


def raising_loop(rank: int, size: int) -> Any:
    with Trainer(job(), timeout_s=60) as trainer:
        for batch in trainer.batches(epochs=1):
            trainer.step(batch)
            if rank == 1:
                raise KeyError("planted")


def raising_model(rank: int, size: int) -> Any:
    def make() -> nn.Module:
        if rank == 1:
            raise KeyError("planted")
        return mlp()

    return Trainer(Job(model=make, loss=cross_entropy, optimizer=adamw), timeout_s=60)


def raising_scheduler(rank: int, size: int) -> Any:
    def schedule(optimizer: Any) -> Any:
        if rank == 1:
            raise KeyError("planted")
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    trainer = Trainer(job(scheduler=schedule), timeout_s=60)
    try:
        trainer.step((features(8), classes(8)))
    except KeyError:
        waiting(rank)
        raise


class Named(nn.Module):
    def __init__(self, names: str, value: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.full((2,), value), requires_grad=not frozen))


def model_that_differs(make: Callable[[int], nn.Module]) -> Callable[[int, int], Any]:
    def case(rank: int, size: int) -> Any:
        made = job(make(rank), optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
        return Trainer(made, timeout_s=60)

    return case


def frozen_on_one_rank(rank: int) -> nn.Module:
    model = Named("ab")
    model.b.requires_grad_(rank == 0)
    return model


FAILING: dict[str, Callable[[int, int], Any]] = {
    "loss": raising_loss,
    "dataset": raising_dataset,
    "dataset in a loader": raising_dataset_in_a_loader,
    "evaluation": raising_evaluation,
    "skipped backward": skipping_the_backward,
    "other batches": other_batches,
    "other rows": other_rows,
    "skipped step": skipping,
    "longer dataset": longer_dataset,
    "longer stream": longer_stream,
    "metric": raising_metric,
    "logger": raising_logger,
    "loop": raising_loop,
    "model": raising_model,
    "scheduler": raising_scheduler,
    "number of parameters": model_that_differs(lambda rank: Named("ab"[: 2 - rank])),
    "order of parameters": model_that_differs(lambda rank: Named("ab" if rank == 0 else "ba")),
    "values of parameters": model_that_differs(lambda rank: Named("ab", float(rank))),
    "frozen parameters": model_that_differs(frozen_on_one_rank),
}


def run_failing(rank: int, size: int, port: int, name: str) -> Any:
    join(rank, size, port)
    return outcome(FAILING[name], rank, size)


def check_all_end(workers: Workers, name: str, size: int = 2) -> list[Any]:
    """Every rank ended within seconds and left no thread; return what each came to."""
    results = workers.run(size, run_failing, free_port(), name, timeout_s=45)
    for result in results:
        assert not isinstance(result, BaseException), result
    found = []
    for rank, (took, result, threads) in enumerate(results):
        if not (isinstance(result, tuple) and result[0] in ("KeyError", "OSError")):  # those may have waited on purpose
            assert took < SECONDS, f"rank {rank} took {took:.1f} s, and then: {result}"
        assert threads == [] or name in ("metric", "logger", "scheduler"), "where the trainer was left open"
        found.append(result)
    return found


def check_first(failure: Any, error: str, message: str, *, rank: int = 1) -> None:
    assert isinstance(failure, Failure), failure
    assert (failure.rank, failure.error) == (rank, error), failure
    assert message in failure.message


@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_in_a_loss_is_what_every_rank_reports(workers: Workers, size: int) -> None:
    results = check_all_end(workers, "loss", size)
    kind, message, notes = results[1]
    assert (kind, message) == ("KeyError", "'planted'")
    micro_batch = {2: 2, 3: 2}[size]
    assert notes == [f"rank 1, step 2, micro-batch {micro_batch}, forward"]
    for rank in set(range(size)) - {1}:
        check_first(results[rank], "KeyError", "planted")
        assert (results[rank].step, results[rank].micro_batch) == (2, micro_batch)
        assert "raise KeyError" in results[rank].trace


@pytest.mark.parametrize("name", ["dataset", "dataset in a loader"])
def test_an_exception_in_a_dataset_is_what_every_rank_reports(workers: Workers, name: str) -> None:
    """The last sample of the second batch: it lies on rank 1 alone."""
    results = check_all_end(workers, name)
    assert results[1][:2] == ("IndexError", "sample 24 cannot be read")
    check_first(results[0], "IndexError", "sample 24 cannot be read")
    assert (results[0].step, results[0].doing) == (2, "loading")


def test_an_exception_in_an_evaluation_is_what_every_rank_reports(workers: Workers) -> None:
    results = check_all_end(workers, "evaluation")
    assert results[1][:2] == ("KeyError", "'planted'")
    check_first(results[0], "KeyError", "planted")


def test_a_rank_that_catches_its_error_and_goes_on_stops_the_others_at_once(workers: Workers) -> None:
    results = check_all_end(workers, "skipped backward")
    check_first(results[0], "MemoryError", "planted")
    check_first(results[1], "MemoryError", "planted")


@pytest.mark.parametrize(("name", "rows"), [("other batches", "(8 rows)"), ("other rows", "(9 rows)")])
def test_ranks_that_are_given_different_batches_are_refused(workers: Workers, name: str, rows: str) -> None:
    results = check_all_end(workers, name)
    words = [result.message if isinstance(result, Failure) else result[1] for result in results]
    assert {result.error if isinstance(result, Failure) else result[0] for result in results} == {"MismatchError"}
    for word in words:
        assert "was given another batch" in word
        assert rows in word
        assert "drop the DistributedSampler" in word


def test_a_step_that_one_rank_leaves_out_is_noticed_before_batches_are_mixed(workers: Workers) -> None:
    results = check_all_end(workers, "skipped step")
    assert not any(isinstance(result, list) for result in results), results
    words = [result.message if isinstance(result, Failure) else result[1] for result in results]
    assert all("batch" in word and "WorkerLeft" not in word for word in words), words


def test_a_rank_with_more_samples_is_noticed_within_seconds(workers: Workers) -> None:
    check_all_end(workers, "longer dataset")


def test_a_rank_with_a_longer_stream_is_noticed_within_seconds(workers: Workers) -> None:
    results = check_all_end(workers, "longer stream")
    assert isinstance(results[1], Failure)
    assert results[1].rank == 0


@pytest.mark.parametrize(("name", "error", "message"), [("metric", "KeyError", "planted"), ("logger", "OSError", "disk full")])
def test_an_exception_in_what_the_main_rank_does_alone_is_what_every_rank_reports(
    workers: Workers, name: str, error: str, message: str
) -> None:
    results = check_all_end(workers, name)
    check_first(results[1], error, message, rank=0)


def test_an_exception_in_the_users_loop_is_what_every_rank_reports(workers: Workers) -> None:
    results = check_all_end(workers, "loop")
    check_first(results[0], "KeyError", "planted")


def test_an_exception_while_the_model_is_built_is_what_every_rank_reports(workers: Workers) -> None:
    results = check_all_end(workers, "model")
    check_first(results[0], "KeyError", "planted")


def test_an_exception_while_a_scheduler_is_made_is_what_every_rank_reports(workers: Workers) -> None:
    results = check_all_end(workers, "scheduler")
    check_first(results[0], "KeyError", "planted")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number of parameters", "rank 0 has 'b' (float32[2]), rank 1 has nothing more (2 and 1 tensors in all)"),
        ("order of parameters", "rank 0 has 'a' (float32[2]), rank 1 has 'b' (float32[2])"),
        ("values of parameters", "rank 0 has 'a' (float32[2]) with values of hash"),
        ("frozen parameters", "rank 0 has 'b' (float32[2]) trained, rank 1 has 'b' (float32[2]) frozen"),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(workers: Workers, name: str, message: str) -> None:
    for result in check_all_end(workers, name):
        kind, words, _ = result
        assert kind == "MismatchError"
        assert "rank 1's model is not rank 0's" in words
        assert message in words
        assert "pass Job(model=function)" in words


def sync(rank: int, size: int, port: int) -> dict[str, Tensor]:
    join(rank, size, port)
    return in_double_with_sync()


def test_synchronised_batchnorm_is_the_whole_batch_on_processes(workers: Workers) -> None:
    results = workers.run(2, sync, free_port())
    reference = run(
        job(batchnorm().double(), data=torch.utils.data.TensorDataset(features(26).double(), classes(26))), "micro_batches=1"
    ).state
    for result in results:
        assert not isinstance(result, BaseException), result
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)


def with_a_metric_object(rank: int, size: int, port: int) -> Any:
    join(rank, size, port)
    dist.init_process_group("gloo")
    made = job(metrics={"function": accuracy, "object": MulticlassAccuracy(CLASSES, average="micro")})
    with Trainer(made, timeout_s=20) as trainer:
        report = dict(trainer.evaluate(dataset(5)))
    dist.destroy_process_group()
    return report


def test_a_metric_object_sees_every_sample_once_on_processes(workers: Workers) -> None:
    for report in workers.run(2, with_a_metric_object, free_port(), timeout_s=20):
        assert not isinstance(report, BaseException), report
        assert report["object"] == pytest.approx(report["function"])


def through_a_handle(rank: int, size: int, port: int) -> Ran:
    join(rank, size, port)
    model = linear()
    return run(job(model, loss=lambda _, batch: cross_entropy(model, batch)), REPRODUCIBLE)


def test_a_loss_through_a_handle_from_outside_is_right_on_processes(workers: Workers) -> None:
    for result in workers.run(2, through_a_handle, free_port()):
        assert_identical(result, run(job(linear), REPRODUCIBLE))
