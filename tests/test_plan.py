"""Plans: what they hold, how they read and print, and what they refuse."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Plan, PlanError


@st.composite
def plans(draw: Any) -> Plan:
    replicas = draw(st.none() | st.integers(1, 64))
    micro_batches = draw(st.none() | st.integers(replicas or 1, 500))
    return Plan(replicas=replicas, stages=draw(st.integers(1, 9)), micro_batches=micro_batches, reproducible=draw(st.booleans()))


@given(plans())
def test_a_plan_reads_as_it_prints(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.of(str(plan)) == plan


@given(plans())
def test_a_plan_survives_toml(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan


@given(plans())
def test_the_repr_of_a_plan_makes_it_again(plan: Plan) -> None:
    assert eval(repr(plan), {"Plan": Plan}) == plan


@given(plans(), st.integers(1, 64))
def test_a_settled_plan_leaves_nothing_open_and_settles_to_itself(plan: Plan, replicas: int) -> None:
    try:
        settled = plan.settle((plan.replicas or replicas) * plan.stages)
    except PlanError as error:
        assert "micro-batches" in str(error)  # noqa: PT017 - the only thing that may not fit
        return
    assert None not in dataclasses.asdict(settled).values()
    assert settled.settle(settled.replicas * settled.stages) == settled
    assert settled.micro_batches >= settled.replicas


def test_spaces_empty_entries_and_capitals_do_not_matter() -> None:
    assert Plan.parse(" replicas = 2 ,, reproducible=TRUE, ") == Plan(replicas=2, reproducible=True)
    assert Plan.parse("") == Plan() == Plan.of(None)


def test_a_plan_is_a_frozen_value() -> None:
    plan = Plan(replicas=2)
    assert Plan.of(plan) is plan
    assert len({plan, Plan(replicas=2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.replicas = 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicas", "plan entry 'replicas' is not name=value; write for example replicas=2,micro_batches=4"),
        ("replicas=", "plan entry 'replicas=' is not name=value; write for example replicas=2,micro_batches=4"),
        ("replicas=2,replicas=2", "replicas stands twice in plan 'replicas=2,replicas=2'; leave one of them out"),
        ("replicas=two", "replicas=two is not a whole number of at least 1; pass for example replicas=2"),
        ("replicas=0", "replicas=0 is not a whole number of at least 1; pass for example replicas=2"),
        ("stages=-1", "stages=-1 is not a whole number of at least 1; pass for example stages=2"),
        ("micro_batches=true", "micro_batches=True is not a whole number of at least 1; pass for example micro_batches=2"),
        ("precision=fp64", "precision='fp64' is not one of fp32; pass precision=fp32"),
        ("reproducible=yes", "reproducible='yes' is neither true nor false; pass reproducible=true"),
        (
            "replica=2",
            "a plan has no 'replica'; it may have replicas, stages, micro_batches, precision, reproducible; did you mean replicas?",
        ),
        ("colour=2", "a plan has no 'colour'; it may have replicas, stages, micro_batches, precision, reproducible; leave it out"),
        (
            "replicas=4,micro_batches=2",
            "replicas=4 needs at least 4 micro-batches, got micro_batches=2; pass micro_batches=4 or more, or replicas=2",
        ),
    ],
)
def test_a_line_that_does_not_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        Plan.parse(text)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize("name", ["replicas", "stages", "micro_batches"])
def test_a_number_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    message = f"{name}={value!r} is not a whole number of at least 1; pass for example {name}=2"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        Plan(**{name: value})


def test_toml_that_does_not_read_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^the plan is not valid TOML \(.*\); write for example replicas = 2$"):
        Plan.from_toml("replicas: 2")
    with pytest.raises(PlanError, match=r"a plan has no 'replica'.*did you mean replicas\?"):
        Plan.from_toml("replica = 2")


@pytest.mark.parametrize(
    ("plan", "workers", "message"),
    [
        (Plan(stages=2), 3, "stages=2 does not divide workers=3; pass a number of workers that is a multiple of stages"),
        (
            Plan(replicas=2, stages=2),
            3,
            "replicas=2 x stages=2 needs 4 workers, got 3; start 4 workers, or leave replicas out to use them all",
        ),
        (
            Plan(micro_batches=2),
            3,
            "replicas=3 needs at least 3 micro-batches, got micro_batches=2; pass micro_batches=3 or more, or replicas=2",
        ),
    ],
)
def test_workers_that_do_not_fit_are_refused(plan: Plan, workers: int, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        plan.settle(workers)


def test_what_is_left_open_is_settled_by_workers_and_job() -> None:
    assert Plan().settle() == Plan(replicas=1, micro_batches=1)
    assert Plan().settle(3) == Plan(replicas=3, micro_batches=3)
    assert Plan().settle(3, 6) == Plan(replicas=3, micro_batches=6)
    assert Plan(micro_batches=9).settle(3, 6) == Plan(replicas=3, micro_batches=9)
    assert Plan(stages=2).settle(4) == Plan(replicas=2, stages=2, micro_batches=8)
