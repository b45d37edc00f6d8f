"""A worker thread's own module tree over shared weights."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.worker.objective import build_optimizer, copy_optimizer, held_by, total_norm
from paceline.worker.replica import mirror, replicate, unit_of
from tests.promises.models import Tied, batchnorm, features, mlp

CPU = torch.device("cpu")


def test_weights_are_shared_and_leaves_are_not() -> None:
    model = mlp()
    replica = replicate(model, CPU)
    for parameter, counterpart in zip(model.parameters(), replica.parameters(), strict=True):
        assert parameter is not counterpart
        assert parameter.data_ptr() == counterpart.data_ptr()
        assert counterpart.is_leaf
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    assert bool((replica[0].weight == 2.0).all())


def test_gradients_are_each_workers_own() -> None:
    model = mlp()
    torch.autograd.backward(replicate(model, CPU)(features(3)).sum())
    assert model[0].weight.grad is None


def test_buffers_are_copied() -> None:
    model = batchnorm()
    replica = replicate(model, CPU)
    replica[1].running_mean.fill_(3.0)
    assert not bool(model[1].running_mean.any())


def test_tied_weights_stay_tied() -> None:
    replica = replicate(Tied(), CPU)
    assert replica.encoder.weight is replica.decoder.weight


def test_weights_over_one_memory_stay_over_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    replica = replicate(model, CPU)
    assert replica[0].weight is not replica[1].weight
    assert replica[0].weight.data_ptr() == replica[1].weight.data_ptr()


def test_parameters_in_lists_of_the_module_are_the_replicas() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = mlp()
            self.mine = [self.base[0].weight]

    replica = replicate(Listing(), CPU)
    assert replica.mine[0] is replica.base[0].weight


def test_what_is_frozen_and_the_modes_are_copied_and_mirrored() -> None:
    model = batchnorm()
    model[0].weight.requires_grad_(False)
    model[1].eval()
    replica = replicate(model, CPU)
    assert not replica[0].weight.requires_grad
    assert [module.training for module in replica] == [True, False, True, True]
    model[0].weight.requires_grad_(True)
    model[1].train()
    model[3].requires_grad_(False)
    mirror(model, replica)
    assert [p.requires_grad for p in replica.parameters()] == [p.requires_grad for p in model.parameters()]
    assert replica[1].training


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"Sequential cannot be copied for worker threads .*transport='processes'"):
        replicate(model, CPU)


def test_the_unit_of_an_error_is_the_innermost_module() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("planted")

    model = nn.Sequential(mlp(), nn.Sequential(Failing()))
    with pytest.raises(ValueError, match="planted") as caught:
        model(features(2))
    assert unit_of(caught.value, model) == "1.0"
    assert unit_of(ValueError(), model) is None


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"]
)
def test_an_optimizer_is_copied_with_its_groups_and_settings(kind: str) -> None:
    """Each device of one process has an optimizer of its own."""
    model, copy = mlp(), mlp()
    make = getattr(torch.optim, kind)
    named = list(model.named_parameters())
    optimizer = make([{"params": named[:2], "lr": 0.5}, {"params": named[2:]}], lr=0.25)
    copied = copy_optimizer(optimizer, model, copy)
    assert type(copied) is type(optimizer)
    assert [id(p) for group in copied.param_groups for p in group["params"]] == [id(p) for p in copy.parameters()]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    assert [{k: v for k, v in group.items() if k != "params"} for group in copied.param_groups] == settings


def test_the_names_that_an_optimizer_holds_are_in_the_models_order() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([model[2].weight, model[0].bias], lr=0.1)
    assert held_by(optimizer, model) == ["0.bias", "2.weight"]


def test_what_an_optimizer_function_returns_must_be_an_optimizer() -> None:
    with pytest.raises(UsageError, match=r"optimizer function of 'loss' returned 5; return one torch optimizer"):
        build_optimizer(lambda named: 5, mlp(), "loss")


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="the model ReLU has no parameters, so there is nothing to train"):
        build_optimizer(lambda named: torch.optim.SGD(named, lr=0.1), nn.ReLU(), "loss")


def test_the_norm_of_all_is_that_of_one_long_vector() -> None:
    tensors = [features(3), features(4).double(), torch.tensor(2.0)]
    assert float(total_norm(tensors)) == pytest.approx(float(torch.cat([t.double().flatten() for t in tensors]).norm()), rel=1e-6)
    assert float(total_norm([])) == 0.0
