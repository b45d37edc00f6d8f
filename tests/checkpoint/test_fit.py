"""Whose state this is, and how two states differ: every answer by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import Checkpoints, State, compare, describe, fits, group_names, snapshot
from tests.checkpoint.states import Tied, a_state


def test_a_state_fits_its_own_model() -> None:
    """Weights, optimizer and groups: nothing to say."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    assert fits(a_state(), model.state_dict(), {"loss": group_names(optimizer, model.named_parameters())}) == []


def test_another_model_is_told_by_every_name() -> None:
    """Missing, unexpected, other shape, other dtype."""
    other = Tied(4).to(torch.float64)
    del other.unused
    other.extra = nn.Linear(1, 1, bias=False)
    told = {(misfit.kind, misfit.name): str(misfit) for misfit in fits(a_state(), other.state_dict())}
    assert told["missing", "extra.weight"].startswith("extra.weight is missing")
    assert ("unexpected", "unused.bias") in told
    assert told["shape", "norm.weight"] == "norm.weight has the shape (8,), the model wants (4,)"
    assert ("dtype", "norm.num_batches_tracked") not in told
    wide = Tied().to(torch.float64)
    assert {misfit.kind for misfit in fits(a_state(), wide.state_dict())} == {"dtype"}


def test_prefixes_and_near_names_are_hinted() -> None:
    """What wrappers add to names is recognised in both directions, and a typo has a neighbour."""
    saved = State(weights={"_orig_mod.a": torch.zeros(1), "layer.weight": torch.zeros(1)}, progress={"steps_done": 0})
    wanted = {"a": torch.zeros(1), "module.layer.weight": torch.zeros(1)}
    told = [str(misfit) for misfit in fits(saved, wanted) if misfit.kind == "missing"]
    assert told == [
        "a is missing; the state has '_orig_mod.a': take the prefix '_orig_mod.' off its names",
        "module.layer.weight is missing; the state has 'layer.weight': "
        "load into the module without its wrapper, which adds 'module.'",
    ]
    near = fits(saved, {"_orig_mod.a": torch.zeros(1), "layer.weigth": torch.zeros(1)})
    assert "nearest name in the state is 'layer.weight'" in str(near[0])


def test_optimizers_that_do_not_fit_are_told() -> None:
    """Another loss, other parameters, other groups."""
    state = a_state()
    names = [name for name, _ in Tied().named_parameters()]
    assert "no state of the optimizer of 'generator'" in str(fits(state, state.weights, {"generator": [names]})[0])
    assert "has no counterpart" in str(fits(state, state.weights, {})[0])
    assert "1 parameter group(s), the optimizer 2" in str(fits(state, state.weights, {"loss": [names[:1], names[1:]]})[0])


def test_differences_are_named_and_measured() -> None:
    """Weights, optimizer entries, progress, objects: by path, with the largest difference."""
    a = a_state()
    b = snapshot(a)
    b.weights["norm.weight"][0] += 0.5
    b.optimizers["loss"].entries["norm.bias"]["step"] += 1
    b.progress["epoch"] = 3
    b.progress["new"] = 1
    b.objects["ema"]["shadow"]["w"] = torch.zeros(2)
    told = {difference.path: difference for difference in compare(a, b)}
    assert set(told) == {
        "weights/norm.weight",
        "optimizers/loss/entries/norm.bias/step",
        "progress/epoch",
        "progress/new",
        "objects/ema/shadow/w",
    }
    assert told["weights/norm.weight"].largest == pytest.approx(0.5)
    assert str(told["weights/norm.weight"]) == "weights/norm.weight: 1 of 8 elements differ, by up to 0.5"
    assert told["progress/epoch"].largest == 2
    assert str(told["progress/new"]) == "progress/new: only in the second"
    assert "float32 (3,) and float32 (2,)" in str(told["objects/ema/shadow/w"])


def test_a_nan_equals_itself_and_zeros_have_signs() -> None:
    """Bits are compared, not numbers."""

    def state(value: float) -> State:
        return State(weights={"w": torch.tensor([value])}, progress={"steps_done": 0, "loss": value})

    assert compare(state(float("nan")), state(float("nan"))) == []
    sets = [State(weights={}, progress={"steps_done": 0}, objects={"seen": set(order)}) for order in ([0, 8], [8, 0])]
    assert compare(*sets) == [], "sets that print in another order are equal"
    assert {difference.path for difference in compare(state(0.0), state(-0.0))} == {"weights/w", "progress/loss"}
    assert len(compare(state(1.0), state(float("nan")))) == 2


def test_a_description_names_what_matters(tmp_path: Path) -> None:
    """Step, sizes, optimizers, progress, facts, files."""
    text = describe(Checkpoints(tmp_path).save(a_state(), best=True))
    for words in (
        "step-00000003, the best so far",
        "after step 3",
        "1 tied names",
        "AdamW, 1 group(s) of 7 parameters, 3 with state",
        "epoch=1",
        "plan=replicas=2",
        "ema",
        "model.safetensors ",
    ):
        assert words in text, text


def test_unused_parameters_have_no_state() -> None:
    """What no loss reached is in the groups and not in the entries."""
    state = a_state().optimizers["loss"]
    assert "unused.weight" in state.groups[0]["params"]
    assert "unused.weight" not in state.entries
