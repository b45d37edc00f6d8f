"""Optimizer state by name: a run that stops and goes on is the run that did not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from paceline.checkpoint import Checkpoints, State, load_optimizer, optimizer_state
from paceline.errors import UsageError
from tests.checkpoint.states import Tied, same, train

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    # A tensor of its own each time: schedulers write into it.
    "adamw, lr a tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "sgd momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
    "nadam": functools.partial(torch.optim.NAdam, lr=0.01),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.01),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [2]
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
}


def a_run(make: Callable[[Any], Optimizer], schedule: Callable[[Optimizer], Any], dtype: torch.dtype) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return model, optimizer, schedule(optimizer)


def stop_and_go_on(folder: Path, make: Any, schedule: Any, dtype: torch.dtype, before: int, after: int) -> None:
    """Hold a run that was saved and loaded into fresh objects against one that was not."""
    model, optimizer, scheduler = a_run(make, schedule, dtype)
    train(model, optimizer, range(before), scheduler)
    state = State(
        weights=model.state_dict(),
        optimizers={"loss": optimizer_state(optimizer, model.named_parameters())},
        schedulers={} if scheduler is None else {"loss": scheduler.state_dict()},
        progress={"steps_done": before},
    )
    loaded = Checkpoints(folder).load(Checkpoints(folder).save(state))
    train(model, optimizer, range(before, before + after), scheduler)

    again, fresh, again_scheduler = a_run(make, schedule, dtype)
    again.load_state_dict(loaded.weights)
    load_optimizer(fresh, again.named_parameters(), loaded.optimizers["loss"])
    if again_scheduler is not None:
        again_scheduler.load_state_dict(loaded.schedulers["loss"])
    train(again, fresh, range(before, before + after), again_scheduler)
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    ended, expected = (optimizer_state(o, m.named_parameters()) for o, m in ((fresh, again), (optimizer, model)))
    assert same(ended.entries, expected.entries)
    assert same(ended.groups, expected.groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    """Three steps after loading give the same bits, for every optimizer."""
    stop_and_go_on(tmp_path, OPTIMIZERS[name], SCHEDULERS["none"], torch.float32, 3, 3)


@settings(max_examples=12, deadline=None)
@given(
    optimizer=st.sampled_from(["adamw", "adamw fused", "adamw, lr a tensor", "sgd momentum", "adafactor"]),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    before=st.integers(0, 5),
    after=st.integers(1, 4),
)
def test_resumed_anywhere_with_any_scheduler(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, scheduler: str, dtype: torch.dtype, before: int, after: int
) -> None:
    """Wherever a run stops, before its first step too, it goes on with the same bits and the same learning rates."""
    folder = tmp_path_factory.mktemp("run")
    stop_and_go_on(folder, OPTIMIZERS[optimizer], SCHEDULERS[scheduler], dtype, before, after)


def adam_over(names: list[str], model: nn.Module, **settings: Any) -> Optimizer:
    parameters = dict(model.named_parameters())
    return torch.optim.Adam([parameters[name] for name in names], lr=0.01, **settings)


def test_state_goes_by_name_not_by_order() -> None:
    """An optimizer that lists its parameters, and its groups, in another order gets each entry where it belongs."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    (a, b), (c, d) = model[0].parameters(), model[1].parameters()
    optimizer = torch.optim.Adam([{"params": [a, c], "lr": 0.5}, {"params": [b, d], "lr": 0.25}])
    train(model, optimizer, range(2))
    other = torch.optim.Adam([{"params": [d, b], "lr": 1.0}, {"params": [c, a], "lr": 1.0}])
    state = optimizer_state(optimizer, model.named_parameters())
    load_optimizer(other, model.named_parameters(), state)
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    assert all(torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"]) for p in (a, b, c, d))
    assert other.state[a]["exp_avg"].data_ptr() != optimizer.state[a]["exp_avg"].data_ptr()


def test_entries_keep_their_dtype_and_take_their_parameters_strides() -> None:
    """FP32 moments of BF16 parameters are not rounded, as torch does; fused kernels find the strides they want."""
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    state = optimizer_state(optimizer, model.named_parameters())
    state.entries["weight"]["exp_avg"] = torch.rand(3, 2, 3, 3)
    half = nn.Conv2d(2, 3, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    into = torch.optim.AdamW(half.parameters(), fused=True)
    load_optimizer(into, half.named_parameters(), state)
    loaded = into.state[half.weight]["exp_avg"]
    assert same(loaded, state.entries["weight"]["exp_avg"])
    assert loaded.stride() == half.weight.stride() != state.entries["weight"]["exp_avg"].stride()


def test_ways_to_compute_stay_the_optimizers_own() -> None:
    """A state saved with `fused` goes into an optimizer without, whose step counter stays where that one wants it."""
    model = nn.Linear(2, 2)
    optimizer = adam_over(["weight", "bias"], model, fused=True)
    train(model, optimizer, range(2))
    other = adam_over(["weight", "bias"], model, foreach=False)
    load_optimizer(other, model.named_parameters(), optimizer_state(optimizer, model.named_parameters()))
    assert (other.param_groups[0]["foreach"], other.param_groups[0]["fused"]) == (False, None)
    assert float(other.state[model.weight]["step"]) == 2


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([["0.weight", "0.bias", "1.weight"]], "1.bias is in the state and not in the optimizer"),
        ([["0.weight", "0.bias", "1.weight", "1.bias"]], r"it has 2 parameter group\(s\), the optimizer 1"),
        ([["0.weight", "1.bias"], ["0.bias", "1.weight"]], "grouped otherwise: 0.weight and 0.bias are in one group in the state"),
    ],
)
def test_other_grouping_is_refused_and_nothing_changes(groups: list[list[str]], says: str) -> None:
    """A state is not spread over other groups, and a refusal leaves the optimizer as it was."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    train(model, optimizer, range(1))
    other = torch.optim.Adam([{"params": [parameters[name] for name in group], "lr": 7.0} for group in groups])
    with pytest.raises(UsageError, match=says):
        load_optimizer(other, model.named_parameters(), optimizer_state(optimizer, model.named_parameters()))
    assert other.state == {}
    assert other.param_groups[0]["lr"] == 7.0


def test_other_class_shape_and_foreign_parameters_are_refused() -> None:
    """Each is told at loading, not in the middle of a later step."""
    model = nn.Linear(2, 2)
    state = optimizer_state(torch.optim.Adam(model.parameters()), model.named_parameters())
    with pytest.raises(UsageError, match="it is of Adam, and the optimizer is SGD"):
        load_optimizer(torch.optim.SGD(model.parameters()), model.named_parameters(), state)
    wider = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"weight has the shape \(2, 3\), in the state \(2, 2\)"):
        load_optimizer(torch.optim.Adam(wider.parameters()), wider.named_parameters(), state)
    with pytest.raises(UsageError, match="no name"):
        optimizer_state(torch.optim.Adam(wider.parameters()), model.named_parameters())


def test_lbfgs_in_another_order_is_refused() -> None:
    """Its history is one vector over all parameters, so another order would mix them up."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    train(model, optimizer, range(1))
    other = torch.optim.LBFGS([model.bias, model.weight])
    with pytest.raises(UsageError, match="LBFGS keeps one vector"):
        load_optimizer(other, model.named_parameters(), optimizer_state(optimizer, model.named_parameters()))


def test_a_tied_parameter_is_found_under_any_of_its_names() -> None:
    """A model that lists its tied names in another order still gets its state."""
    model = Tied()
    optimizer = torch.optim.Adam([model.embed.weight])
    train(model, optimizer, range(1))
    state = optimizer_state(optimizer, [("head.weight", model.head.weight)])
    into = torch.optim.Adam([model.embed.weight])
    load_optimizer(into, model.named_parameters(remove_duplicate=False), state)
    assert same(dict(into.state[model.embed.weight]), state.entries["head.weight"])
