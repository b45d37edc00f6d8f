"""Jobs: checked when they are made, with messages that say what is allowed."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Job, UsageError
from paceline.job import takes_total_steps
from tests.promises.models import cross_entropy, linear, sgd

MODEL = linear()


def make(**changes: Any) -> Job:
    return Job(**{"model": MODEL, "loss": cross_entropy, "optimizer": sgd, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 5}, "model=5 is neither an nn.Module nor a function that builds one"),
        ({"loss": 5}, "loss=5 is not a function; pass loss=lambda model, batch: ..."),
        ({"loss": {"a": 5}, "optimizer": {"a": sgd}}, "loss['a']=5 is not a function; pass loss=lambda model, batch: ..."),
        (
            {"loss": {"a": cross_entropy, "b": cross_entropy}, "optimizer": {"b": sgd, "a": sgd}},
            "loss names a, b and optimizer names b, a differ; give every named loss the optimizer of its name, in the same order",
        ),
        (
            {"loss": {"a": cross_entropy, "b": cross_entropy}},
            "several losses a, b share one optimizer; pass a dict with one for each name",
        ),
        (
            {"optimizer": 5},
            "optimizer=5 is neither a torch optimizer nor a function of named parameters; "
            "pass for example optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)",
        ),
        (
            {"optimizer": torch.optim.SGD},
            "optimizer=<class 'torch.optim.sgd.SGD'> is neither a torch optimizer nor a function of named parameters; "
            "pass for example optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)",
        ),
        (
            {"model": linear, "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1)},
            "optimizer is an optimizer already, but model is a function that builds the module later; "
            "pass optimizer=lambda named: ..., or the module itself",
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 5).parameters(), lr=0.1)},
            "the optimizer holds 2 tensor(s) that are not parameters of the model, the first of shape (5, 2); they would train "
            "apart on every worker. Register them in the model, or build the optimizer over model.parameters()",
        ),
        ({"scheduler": {"x": sgd}}, "scheduler names x are not among the losses loss; rename them"),
        ({"scheduler_every": "batch"}, "scheduler_every='batch' is neither 'step' nor 'epoch'"),
        ({"batch_size": 0}, "batch_size=0 is not a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5 is not a whole number of at least 1"),
        ({"micro_batches": True}, "micro_batches=True is not a whole number of at least 1"),
        ({"epochs": -1}, "epochs=-1 is not a whole number of at least 1"),
        ({"steps": 0}, "steps=0 is not a whole number of at least 1"),
        ({"intra_op_threads": 0}, "intra_op_threads=0 is not a whole number of at least 1"),
        ({"num_workers": -1}, "num_workers=-1 is not a whole number of at least 0"),
        ({"seed": "x"}, "seed='x' is not a whole number"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 is not above 0; pass the largest norm, or math.inf to report it only"),
        ({"clip_norm": float("nan")}, "clip_norm=nan is not above 0; pass the largest norm, or math.inf to report it only"),
        (
            {"buffers": {"b": "product"}},
            "buffers['b']='product' is not one of sum, mean, max, min, last, cache, nor a function(before, values)",
        ),
        ({"metrics": {"m": 5}}, "metrics['m']=5 is neither a function nor an object with update and compute"),
    ],
)
def test_what_a_job_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        make(**changes)


@pytest.mark.parametrize("name", ["count", "predict", "target", "sample", "collate", "scheduler"])
def test_what_must_be_a_function_is_checked_when_the_job_is_made(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        make(**{name: 5})


@pytest.mark.parametrize("changes", [{"loss": {}, "optimizer": {}}, {"clip_norm": "1"}])
def test_what_makes_no_sense_is_refused_as_such(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make(**changes)


def test_a_job_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().seed = 1


def test_one_loss_is_called_loss() -> None:
    assert list(make().losses) == ["loss"] == list(make().optimizers)


def test_several_losses_keep_their_order_and_schedulers() -> None:
    losses, optimizers = {"b": cross_entropy, "a": cross_entropy}, {"b": sgd, "a": sgd}
    one = make(loss=losses, optimizer=optimizers, scheduler={"a": sgd})
    assert list(one.losses) == ["b", "a"]
    assert (one.scheduler_of("a"), one.scheduler_of("b")) == (sgd, None)
    shared = make(loss=losses, optimizer=optimizers, scheduler=sgd)
    assert (shared.scheduler_of("a"), shared.scheduler_of("b")) == (sgd, sgd)


@pytest.mark.parametrize(
    ("function", "wants"),
    [
        (lambda optimizer: None, False),
        (lambda optimizer, total_steps: None, True),
        (lambda optimizer, steps: None, True),
        (lambda optimizer, total_steps=5: None, True),
        (lambda optimizer, gamma=0.5: None, False),
    ],
)
def test_a_scheduler_function_is_told_the_steps_where_it_asks(function: Any, wants: bool) -> None:
    assert takes_total_steps(function) is wants


def test_the_repr_says_what_is_trained() -> None:
    assert repr(make(batch_size=4, name="mine")) == "Job('mine', Linear of 21 parameters, batch_size=4)"
    assert repr(make(model=linear)) == "Job('job', model from linear, batch_size=None)"


def test_the_description_is_plain_and_without_addresses() -> None:
    words = make(data=[1], metrics={"m": len}, split={"x": 1}, buffers={"b": "sum"}).describe()
    assert json.loads(json.dumps(words)) == words
    assert "0x" not in json.dumps(words)
    assert (words["data"], words["metrics"], words["buffers"], words["model"]) == ("list", {"m": "len"}, {"b": "sum"}, "Linear")
