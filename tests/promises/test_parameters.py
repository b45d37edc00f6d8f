"""Unused, frozen, tied, foreign, sparse, mixed parameters: they train as on one device, or are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Job, Trainer, UsageError
from tests.promises.models import (
    CLASSES,
    FEATURES,
    Tied,
    Unused,
    assert_close,
    assert_identical,
    classes,
    cross_entropy,
    dataset,
    features,
    job,
    mlp,
    run,
    sgd,
)

PLANS = ["replicas=2,micro_batches=4", "replicas=3,micro_batches=4,reproducible=true"]


def check(make: Callable[[], Job], plan: str, steps: int = 4) -> None:
    """The plan gives what one worker gives with the same micro-batches: the same bits, or equal to rounding."""
    alone = plan.replace("replicas=2", "replicas=1").replace("replicas=3", "replicas=1")
    compare = assert_identical if "reproducible" in plan else assert_close
    compare(run(make(), plan, steps), run(make(), alone, steps))


@pytest.mark.parametrize("plan", PLANS)
def test_a_layer_that_only_some_workers_use_trains(plan: str) -> None:
    check(lambda: job(Unused, optimizer=lambda named: torch.optim.Adam(named, lr=0.1)), plan)


@pytest.mark.parametrize("plan", ["replicas=1,micro_batches=4", *PLANS])
def test_a_layer_without_use_has_no_gradient_and_keeps_its_weight(plan: str) -> None:
    """Not a zero gradient: weight decay and momentum would move the weight."""
    model = Unused()
    before = model.never.weight.detach().clone()
    with Trainer(job(model, optimizer=lambda n: torch.optim.SGD(n, lr=0.1, weight_decay=0.5)), plan, timeout_s=20) as trainer:
        for batch in trainer.batches(steps=3):
            trainer.step(batch)
            assert model.never.weight.grad is None
    assert torch.equal(model.never.weight, before)


@pytest.mark.parametrize("plan", PLANS)
def test_a_frozen_layer_stays_and_the_others_train(plan: str) -> None:
    def make() -> Job:
        model = mlp()
        model[0].requires_grad_(False)
        return job(model)

    check(make, plan)
    assert torch.equal(run(make(), plan).state["0.weight"], mlp()[0].weight)


@pytest.mark.parametrize("plan", ["replicas=1", "replicas=2", "replicas=2,reproducible=true"])
def test_a_model_that_is_frozen_throughout_is_refused_at_construction(plan: str) -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(UsageError, match=r"all 4 parameters of the optimizer of 'loss' are frozen.*requires_grad_\(True\)"):
        Trainer(job(model), plan)


@pytest.mark.parametrize("plan", ["replicas=1,micro_batches=4", *PLANS])
def test_what_is_frozen_and_freed_between_steps_stays_and_trains(plan: str) -> None:
    def train(plan: str) -> tuple[list[float], dict[str, Tensor]]:
        model = mlp()
        model[2].bias.requires_grad_(False)
        losses = []
        with Trainer(job(model), plan, timeout_s=20) as trainer:
            for number, batch in enumerate(trainer.batches(steps=4)):
                model[0].weight.requires_grad_(number < 2)
                model[2].bias.requires_grad_(number > 0)
                before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
                losses.append(trainer.step(batch).loss)
                after = dict(model.named_parameters())
                moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
                expected = {"0.bias", "2.weight"} | ({"0.weight"} if number < 2 else set()) | ({"2.bias"} if number > 0 else set())
                assert moved == expected
            return losses, dict(model.state_dict())

    losses, state = train(plan)
    reference_losses, reference = train("replicas=1,micro_batches=4")
    assert losses == pytest.approx(reference_losses, rel=1e-5)
    torch.testing.assert_close(state, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_tied_weights_take_one_update_and_stay_tied(plan: str) -> None:
    check(lambda: job(Tied), plan)
    with Trainer(job(Tied), plan, timeout_s=20) as trainer:
        trainer.step((features(8), classes(8)))
        tied: list[bool] = []
        trainer.check_workers(lambda model, _: tied.append(model.encoder.weight is model.decoder.weight))
    assert tied == [True] * len(tied)
    assert len(tied) > 1


@pytest.mark.parametrize("late", ["MainThread", "paceline-0", "paceline-1"])
@pytest.mark.parametrize("plan", ["replicas=2,micro_batches=4", "replicas=2,micro_batches=4,reproducible=true"])
def test_a_loss_through_a_handle_from_outside_is_right_or_refused(plan: str, late: str) -> None:
    """A loss that calls the module that it closes over, not the one it is given, must not train each worker by itself."""

    def train(plan: str, through_given: bool) -> Tensor:
        model = mlp()

        def loss(given: nn.Module, batch: Any) -> Tensor:
            if threading.current_thread().name == late:
                time.sleep(0.05)
            return cross_entropy(given if through_given else model, batch)

        with Trainer(job(model, loss=loss), plan, timeout_s=20) as trainer:
            for batch in trainer.batches(steps=3):
                trainer.step(batch)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    try:
        result = train(plan, through_given=False)
    except UsageError as error:
        assert "compute the loss from the model that is passed to it" in str(error)  # noqa: PT017 - either is fine
        return
    torch.testing.assert_close(result, train(plan, through_given=True), rtol=1e-4, atol=1e-5)


def adapted() -> tuple[nn.Module, nn.Parameter]:
    """A model in which a forward was replaced by one with a parameter that the module does not know."""
    model = mlp()
    adapter = nn.Parameter(torch.zeros(8, FEATURES))
    inner = model[0]
    inner.forward = lambda x: F.linear(x, inner.weight + adapter, inner.bias)
    return model, adapter


def test_an_optimizer_over_an_adapter_outside_of_the_model_is_refused() -> None:
    model, adapter = adapted()
    message = r"the optimizer holds 1 tensor\(s\) that are not parameters of the model, the first of shape \(8, 6\)"
    with pytest.raises(UsageError, match=message):
        job(model, optimizer=torch.optim.SGD([*model.parameters(), adapter], lr=0.1))
    made = job(model, optimizer=lambda named: torch.optim.SGD([*(p for _, p in named), adapter], lr=0.1))
    for plan in ("replicas=1", "replicas=2"):
        with pytest.raises(UsageError, match=message):
            Trainer(made, plan)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = mlp()
        self.adapter = nn.Parameter(torch.zeros(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.adapter


@pytest.mark.parametrize("plan", PLANS)
def test_an_adapter_that_is_registered_trains_like_any_parameter(plan: str) -> None:
    check(lambda: job(Adapted), plan)
    assert run(job(Adapted), plan).state["adapter"].abs().sum() > 0


@pytest.mark.parametrize("plan", ["replicas=1,micro_batches=4", *PLANS])
def test_a_gradient_hook_of_a_parameter_counts_on_every_worker(plan: str) -> None:
    """A hook that masks a gradient keeps these weights still, whoever computes the gradient - or it is refused."""
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    before = model[0].weight.detach().clone()
    try:
        run(job(model), plan)
    except UsageError:
        return
    assert torch.equal(model[0].weight, before)


class Flagged(nn.Module):
    """What the forward does stands on its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = mlp()
        self.base[0].weight.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * getattr(self.base[0].weight, "factor", 1.0)


@pytest.mark.parametrize("plan", PLANS)
def test_attributes_of_parameters_are_there_on_every_worker(plan: str) -> None:
    check(lambda: job(Flagged), plan)


@pytest.mark.parametrize("plan", PLANS)
def test_a_sparse_gradient_is_refused_with_replicas(plan: str) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, FEATURES, sparse=True), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    with (
        Trainer(job(Sparse, optimizer=lambda n: torch.optim.SGD(n, lr=0.1)), plan, timeout_s=20) as trainer,
        pytest.raises(UsageError, match=r"the gradient of 'table.weight' is torch.sparse_coo.*build the module with sparse=False"),
    ):
        trainer.step((torch.arange(8) % 5, classes(8)))


class Mixed(nn.Module):
    """Parameters of three dtypes, one of them between the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 8)
        self.middle = nn.Linear(8, 8).double()
        self.low = nn.Linear(8, 8).bfloat16()
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.low(torch.tanh(self.middle(self.first(x).double())).bfloat16()).float())


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_of_mixed_dtypes_train(plan: str) -> None:
    alone = plan.replace("replicas=2", "replicas=1").replace("replicas=3", "replicas=1")
    ran, reference = run(job(Mixed), plan), run(job(Mixed), alone)
    if "reproducible" in plan:
        assert_identical(ran, reference)
    torch.testing.assert_close(ran.state, reference.state, rtol=2e-2, atol=2e-3)
    assert ran.state["middle.weight"].dtype == torch.float64
    for name in ("first.weight", "middle.weight", "low.weight", "last.weight"):
        assert not torch.equal(ran.state[name], Mixed().state_dict()[name])


@pytest.mark.parametrize("plan", PLANS)
def test_a_double_model_trains_in_double(plan: str) -> None:
    data = torch.utils.data.TensorDataset(features(26).double(), classes(26))
    alone = plan.replace("replicas=2", "replicas=1").replace("replicas=3", "replicas=1")
    assert_close(run(job(mlp().double(), data=data), plan), run(job(mlp().double(), data=data), alone), 1e-12)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(2, 4, 2), nn.Linear(16, CLASSES)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(1, 3).view(-1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        return self.head(torch.relu(self.conv(x)).flatten(1))


@pytest.mark.parametrize("plan", PLANS)
def test_weights_in_channels_last_train_and_stay_so(plan: str) -> None:
    check(lambda: job(Conv), plan)
    with Trainer(job(Conv), plan, timeout_s=20) as trainer:
        trainer.step((features(8), classes(8)))
        weight = trainer.model.conv.weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("plan", PLANS)
def test_a_weight_with_gaps_in_memory_trains(plan: str) -> None:
    def make() -> Job:
        model = mlp()
        model[0].weight = nn.Parameter(torch.randn(8, 2 * FEATURES, generator=torch.Generator().manual_seed(3))[:, ::2])
        return job(model)

    check(make, plan)


def test_groups_with_settings_of_their_own_keep_them() -> None:
    def groups(named: Any) -> torch.optim.Optimizer:
        biases = [p for name, p in named if name.endswith("bias")]
        return torch.optim.SGD([{"params": biases, "lr": 0.0}, {"params": [p for n, p in named if "weight" in n]}], lr=0.1)

    state = run(job(mlp, optimizer=groups), "replicas=2").state
    assert torch.equal(state["0.bias"], mlp()[0].bias)
    assert not torch.equal(state["0.weight"], mlp()[0].weight)


def test_a_parameter_that_no_optimizer_holds_stays() -> None:
    model = mlp()
    run(job(model, optimizer=lambda named: torch.optim.SGD(named[:2], lr=0.1)), "replicas=2")
    assert torch.equal(model[2].weight, mlp()[2].weight)
    assert not torch.equal(model[0].weight, mlp()[0].weight)


def test_an_optimizer_over_the_given_module_is_used() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run(job(model, optimizer=optimizer), "replicas=2")
    assert len(optimizer.state) == 4
    assert_close(
        run(job(optimizer=lambda n: torch.optim.Adam(n, lr=0.1)), "replicas=2"),
        run(job(optimizer=lambda n: torch.optim.Adam(n, lr=0.1)), "replicas=1,micro_batches=2"),
        1e-3,
    )


def test_the_users_module_has_no_hooks_of_the_engine_after_a_step_or_a_failure() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if (batch[1] == 1).sum() > 100:
            raise ValueError("planted")
        return cross_entropy(model, batch)

    for plan in (*PLANS, "replicas=1,micro_batches=2"):
        model = mlp()
        with Trainer(job(model, loss=loss, data=dataset(500), batch_size=250, optimizer=sgd), plan, timeout_s=20) as trainer:
            trainer.step((features(8), classes(8)))
            assert _hooks(model) == 0
            with pytest.raises(ValueError, match="planted"):
                trainer.step((features(900), torch.ones(900, dtype=torch.long)))
        assert _hooks(model) == 0


def _hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters())
