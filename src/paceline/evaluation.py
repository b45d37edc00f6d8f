"""Every sample once, in order, whoever computed it: losses, metrics and predictions folded from all workers' parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from paceline.data.join import concatenate
from paceline.errors import UsageError
from paceline.report.reports import EvaluationReport
from paceline.worker.worker import Evaluated

ASKS_FOR_OTHERS = "distributed_available_fn"  # torchmetrics' own name for the function that says whether there are other processes


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which evaluation is the best so far, and when to stop waiting for a better one.

    Args:
        metric: `loss`, or the name of one of the job's metrics.
        mode: `min` where less is better, `max` where more is.
        patience: stop after so many evaluations in a row without a better one; None never stops.

    >>> Best(metric="accuracy", mode="max").improves(0.9, 0.8)
    True
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    patience: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f"mode={self.mode!r} is neither 'min' nor 'max'")
        if self.patience is not None and self.patience < 1:
            raise UsageError(f"patience={self.patience!r} is not at least 1; leave it out to train to the end")

    def improves(self, value: float, before: float | None) -> bool:
        """Return whether a value is better than the best before it; not a number never is."""
        if math.isnan(value):
            return False
        return before is None or (value < before if self.mode == "min" else value > before)


class BestSoFar:
    """The best evaluation of a run and how many have come since without a better one; `memory` is what checkpoints keep of it."""

    def __init__(self, memory: Mapping[str, Any] | None = None) -> None:
        self.memory: dict[str, Any] = dict(memory or {})

    def improves(self, best: Best, evaluation: EvaluationReport, step: int) -> bool:
        """Return whether an evaluation is the best so far, and remember it or count that it is not."""
        if best.metric not in evaluation:
            raise UsageError(f"best is by {best.metric!r}, and an evaluation has {', '.join(evaluation)}; pass one of these")
        value = float(evaluation[best.metric])
        before: dict[str, Any] = self.memory if self.memory.get("metric") == best.metric else {"metric": best.metric}
        if not best.improves(value, before.get("value")):
            self.memory = {**before, "since": before.get("since", 0) + 1}
            return False
        self.memory = {"metric": best.metric, "value": value, "step": step, "since": 0}
        return True

    def is_out_of_patience(self, best: Best | None) -> bool:
        """Return whether so many evaluations in a row were no better that waiting for another is not wanted."""
        if best is None or best.patience is None or self.memory.get("metric") != best.metric:
            return False
        return int(self.memory["since"]) >= best.patience


def default_predict(model: nn.Module, batch: Any) -> Any:
    """Return `model(x)` of an `(x, y)` batch, or `model(batch)` of a tensor."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return model(batch[0])
    raise UsageError(
        f"metrics and predictions of a {type(batch).__name__} batch need to know what to call; "
        "pass Job(predict=lambda model, batch: ...)"
    )


def default_target(batch: Any) -> Any:
    """Return `y` of an `(x, y)` batch."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[1]
    raise UsageError(f"metrics of a {type(batch).__name__} batch need to know the targets; pass Job(target=lambda batch: ...)")


def in_order(parts: Iterable[Mapping[int, Evaluated]]) -> list[Evaluated]:
    """Return all ranks' parts of one global batch in the order of their micro-batches."""
    merged = {micro_batch: value for part in parts for micro_batch, value in part.items()}
    return [merged[micro_batch] for micro_batch in sorted(merged)]


class MetricFold:
    """Metrics over a stream of batches; used on one rank, so that each sample counts once."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._objects = {name: metric for name, metric in metrics.items() if hasattr(metric, "update")}
        self._functions: dict[str, Callable[[Any, Any], Any]] = {
            name: metric for name, metric in metrics.items() if name not in self._objects
        }
        self._seen: list[Evaluated] = []
        for metric in self._objects.values():
            if hasattr(metric, "reset"):
                metric.reset()

    def update(self, part: Evaluated) -> None:
        """Take in the next micro-batch."""
        for metric in self._objects.values():
            metric.update(part.outputs, part.targets)
        if self._functions:
            self._seen.append(part)

    def compute(self) -> dict[str, float]:
        """Return the value of every metric; empty where nothing was seen."""
        values: dict[str, float] = {}
        with contextlib.ExitStack() as stack:
            for name, metric in self._objects.items():
                stack.enter_context(_without_sync(metric))
                values[name] = _number(name, metric.compute())
        if self._functions:
            predictions = join_outputs(self._seen)
            targets = concatenate([part.targets for part in self._seen], [part.rows for part in self._seen])
            values.update({name: _number(name, function(predictions, targets)) for name, function in self._functions.items()})
        return values


@contextlib.contextmanager
def _without_sync(metric: Any) -> Iterator[None]:
    """Keep torchmetrics from adding up over processes: this rank has seen all samples, and it is alone here."""
    parts = [part for part in (metric.modules() if isinstance(metric, nn.Module) else [metric]) if hasattr(part, ASKS_FOR_OTHERS)]
    before = [getattr(part, ASKS_FOR_OTHERS) for part in parts]
    for part in parts:
        setattr(part, ASKS_FOR_OTHERS, _nobody)
    try:
        yield
    finally:
        for part, function in zip(parts, before, strict=True):
            setattr(part, ASKS_FOR_OTHERS, function)


def _nobody() -> bool:
    return False


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"metric {name!r} came to {value!r}, which is not one number; return a number") from None


def join_outputs(parts: Sequence[Evaluated]) -> Any:
    """Return the outputs of consecutive micro-batches as one, of the same structure."""
    if not parts:
        raise UsageError("there is nothing to predict: the data is empty")
    return concatenate([part.outputs for part in parts], [part.rows for part in parts])
