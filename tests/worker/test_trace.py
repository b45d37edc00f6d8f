"""What happened when."""

from __future__ import annotations

import json

import pytest

from paceline import Span, Trace, Trainer
from tests.promises.models import job


def test_spans_are_ordered_by_start() -> None:
    spans = [Span(1, "b", 2.0, 3.0), Span(0, "a", 1.0, 4.0), Span(0, "c", 2.0, 2.5)]
    assert [span.action for span in Trace.of(spans).spans] == ["a", "c", "b"]


def test_busy_time_is_that_of_a_rank_and_its_actions() -> None:
    trace = Trace.of([Span(0, "forward", 0.0, 1.0), Span(0, "backward", 1.0, 3.0), Span(1, "forward", 0.0, 5.0)])
    assert (trace.busy_s(0), trace.busy_s(0, "backward"), trace.busy_s(1), trace.duration_s) == (3.0, 2.0, 5.0, 5.0)


def test_an_empty_trace_lasts_no_time() -> None:
    assert (Trace().duration_s, Trace().busy_s(0)) == (0.0, 0.0)


def test_the_chrome_form_has_a_row_for_each_rank_in_microseconds() -> None:
    events = json.loads(Trace.of([Span(1, "forward", 0.5, 0.75, 3)]).to_chrome())["traceEvents"]
    assert events == [{"name": "forward 3", "cat": "forward", "ph": "X", "ts": 500000.0, "dur": 250000.0, "pid": 0, "tid": 1}]


@pytest.mark.parametrize("plan", ["replicas=1,micro_batches=4", "replicas=2,micro_batches=4"])
def test_a_step_records_every_forward_and_backward_of_every_worker(plan: str) -> None:
    with Trainer(job(), plan, trace=True, timeout_s=20) as trainer:
        for batch in trainer.batches(steps=2):
            trainer.step(batch)
        spans = trainer.trace.spans
    for action in ("forward", "backward"):
        assert sorted(span.micro_batch for span in spans if span.action == action) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {span.rank for span in spans} == set(range(trainer.size))
    assert all(span.end_s >= span.start_s for span in spans)


def test_nothing_is_recorded_unless_asked_for() -> None:
    with Trainer(job(), "replicas=2", timeout_s=20) as trainer:
        trainer.step(next(trainer.batches(steps=1)))
        assert trainer.trace == Trace()
