"""Same job, same micro-batches, any number of replicas: the same losses and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.promises.models import MODELS, adamw, assert_close, assert_identical, dataset, job, run, sgd


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    micro_batches = draw(st.integers(2, 8))
    return {
        "model": draw(st.sampled_from(sorted(MODELS))),
        "rows": draw(st.integers(2 * micro_batches, 3 * micro_batches)),
        "micro_batches": micro_batches,
        "replicas": draw(st.integers(2, min(4, micro_batches))),
        "clip_norm": draw(st.sampled_from([None, 0.1])),
        "optimizer": draw(st.sampled_from([sgd, adamw])),
        "weighted": draw(st.booleans()),
    }


def job_of(case: dict[str, Any]) -> Any:
    return job(
        MODELS[case["model"]],
        data=dataset(2 * case["rows"]),
        batch_size=case["rows"],
        clip_norm=case["clip_norm"],
        optimizer=case["optimizer"],
        # Any count that is not the rows: rows weigh by their class.
        count=(lambda batch: int((1 + batch[1]).sum())) if case["weighted"] else None,
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_replicas_give_the_same_bits_in_reproducible_mode(case: dict[str, Any]) -> None:
    pieces = f"micro_batches={case['micro_batches']},reproducible=true"
    reference = run(job_of(case), f"replicas=1,{pieces}")
    assert_identical(run(job_of(case), f"replicas={case['replicas']},{pieces}"), reference)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_replicas_give_the_same_result_to_rounding_otherwise(case: dict[str, Any]) -> None:
    if case["optimizer"] is adamw:  # which makes a whole step of what rounding leaves of a gradient of zero
        case["optimizer"] = sgd
    pieces = f"micro_batches={case['micro_batches']}"
    assert_close(run(job_of(case), f"replicas={case['replicas']},{pieces}"), run(job_of(case), f"replicas=1,{pieces}"), 2e-4)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_another_seed_of_the_masks_is_another_run(replicas: int) -> None:
    """The comparison can fail: a difference that is there is seen."""
    pieces = "micro_batches=4,reproducible=true"
    ran, other = run(job(MODELS["dropout"]), f"replicas={replicas},{pieces}"), run(job(MODELS["dropout"], seed=1), pieces)
    with pytest.raises(AssertionError):
        assert_identical(ran, other)


def test_micro_batches_are_the_accumulation() -> None:
    """Without masks and BatchNorm the number of micro-batches does not matter either, but for rounding."""
    reference = run(job(), "micro_batches=1")
    for pieces in (2, 5, 13):
        assert_close(run(job(), f"replicas=2,micro_batches={pieces}"), reference)


def test_more_micro_batches_than_rows_leave_workers_without_work() -> None:
    pieces = "micro_batches=6,reproducible=true"
    small = dataset(8)  # batches of 5 and 3 rows
    reference = run(job(data=small, batch_size=5), f"replicas=1,{pieces}")
    assert_identical(run(job(data=small, batch_size=5), f"replicas=4,{pieces}"), reference)


def test_a_trainer_over_the_same_module_goes_on_from_its_weights() -> None:
    model = MODELS["mlp"]()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ran = run(job(model), "replicas=2")
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(dict(model.state_dict()), ran.state, rtol=0, atol=0)
