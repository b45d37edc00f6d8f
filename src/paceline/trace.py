"""What happened when: timed actions of all workers, the same value whether they were measured or simulated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One action of one rank; `start_s` and `end_s` are seconds on one clock, `micro_batch` is None where it has none."""

    rank: int
    action: str
    start_s: float
    end_s: float
    micro_batch: int | None = None


@dataclass(frozen=True)
class Trace:
    """Timed actions, ordered by start.

    >>> trace = Trace.of([Span(0, "backward", 2.0, 4.0, 0), Span(0, "forward", 1.0, 2.0, 0)])
    >>> [span.action for span in trace.spans], trace.duration_s, trace.busy_s(0)
    (['forward', 'backward'], 3.0, 3.0)
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Trace:
        """Return a trace of spans in any order."""
        return cls(tuple(sorted(spans, key=lambda span: (span.start_s, span.rank, span.end_s))))

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end; 0 for an empty trace."""
        return max((span.end_s for span in self.spans), default=0.0) - min((span.start_s for span in self.spans), default=0.0)

    def busy_s(self, rank: int, *actions: str) -> float:
        """Return how many seconds a rank spent in the named actions, or in all of them where none is named."""
        wanted = [span for span in self.spans if span.rank == rank and (not actions or span.action in actions)]
        return sum(span.end_s - span.start_s for span in wanted)

    def to_chrome(self) -> str:
        """Return the trace as JSON that chrome://tracing and Perfetto open: one row per rank, microseconds."""
        events = [
            {
                "name": span.action if span.micro_batch is None else f"{span.action} {span.micro_batch}",
                "cat": span.action,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": 0,
                "tid": span.rank,
            }
            for span in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
