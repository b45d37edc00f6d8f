"""What a step and an evaluation say of themselves: values that cost nothing until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

Number: TypeAlias = "float | Tensor"


class _LazyFloats(Mapping[str, float]):
    """Numbers by name that may be tensors still being computed; each becomes a float when it is first read."""

    def __init__(self, numbers: Mapping[str, Number]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name]
        if not isinstance(number, float):
            number = self._numbers[name] = _float(number)
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return repr(dict(self))


class StepReport:
    """What one optimizer step did. Making it waits for nothing; reading a loss, norm or metric waits for the device.

    Args:
        step: the optimizer step, counted from 1.
        epoch: the pass over the data, counted from 0.
        losses: by name, the loss over the whole global batch; a job with one loss calls it `loss`.
        lrs: by loss name, the learning rate of its optimizer's first group in this step; None where nothing was to be updated.
        grad_norm: the norm of all gradients before clipping; None where the job does not ask for it.
        stepped: whether the optimizers stepped.
        why_skipped: why they did not.
        metrics: by name, the further scalars that the loss returned.
        rows: rows of the global batch.
        count: what the mean was taken over.
        seconds: wall-clock seconds of the step.
    """

    kind: ClassVar[str] = "step"

    def __init__(
        self,
        *,
        step: int,
        epoch: int,
        losses: Mapping[str, Number],
        lrs: Mapping[str, float | None],
        rows: int,
        count: Number,
        seconds: float,
        grad_norm: Number | None = None,
        stepped: bool = True,
        why_skipped: str | None = None,
        metrics: Mapping[str, Number] | None = None,
    ) -> None:
        self.step, self.epoch = step, epoch
        self.losses: Mapping[str, float] = _LazyFloats(losses)
        self.lrs: dict[str, float] = {name: float(lr) for name, lr in lrs.items() if lr is not None}
        self.metrics: Mapping[str, float] = _LazyFloats(metrics or {})
        self.stepped, self.why_skipped = stepped, why_skipped
        self.rows, self.seconds = rows, seconds
        self._count, self._grad_norm = count, grad_norm

    @property
    def loss(self) -> float:
        """The loss; of several, their sum in order."""
        return sum(self.losses.values())

    @property
    def lr(self) -> float:
        """The learning rate of the first group of the first optimizer; 0 where nothing was to be updated."""
        return next(iter(self.lrs.values()), 0.0)

    @property
    def count(self) -> float:
        """What the mean was taken over: rows, or the sum of `Job.count`."""
        self._count = float(self._count)
        return self._count

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients before clipping, or None where the job does not ask for it."""
        if self._grad_norm is not None:
            self._grad_norm = _float(self._grad_norm)
        return self._grad_norm

    @property
    def samples_per_s(self) -> float:
        """Rows of the global batch per second of this step."""
        return self.rows / self.seconds if self.seconds > 0 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """Return everything as one flat dict of plain values; waits for the device."""
        flat: dict[str, Any] = {"kind": self.kind, "step": self.step, "epoch": self.epoch, "loss": self.loss}
        if len(self.losses) > 1:
            flat |= {f"loss/{name}": value for name, value in self.losses.items()}
        flat["lr"] = self.lr
        if len(self.lrs) > 1:
            flat |= {f"lr/{name}": value for name, value in self.lrs.items()}
        flat |= {"grad_norm": self.grad_norm, "stepped": self.stepped, "why_skipped": self.why_skipped}
        flat |= {"rows": self.rows, "count": self.count, "seconds": self.seconds, "samples_per_s": self.samples_per_s}
        return flat | _apart(self.metrics, flat)

    def __repr__(self) -> str:
        skipped = "" if self.stepped else f", skipped: {self.why_skipped}"
        return f"StepReport(step={self.step}, loss={self.loss:.6g}, lr={self.lr:.3g}{skipped})"


class EvaluationReport(Mapping[str, Any]):
    """Loss and metrics over a whole data set, also by name: `report["accuracy"]`.

    Args:
        step: optimizer steps done when it was taken.
        loss: the mean loss; None where the job's loss was not computed.
        metrics: by name, what the metrics returned.
        rows: samples seen, each once.
        seconds: wall-clock seconds it took.
    """

    kind: ClassVar[str] = "evaluation"

    def __init__(self, *, step: int, loss: Number | None, metrics: Mapping[str, Any], rows: int, seconds: float) -> None:
        self.step, self.rows, self.seconds = step, rows, seconds
        self._loss = loss
        self.metrics: dict[str, Any] = dict(metrics)

    @property
    def loss(self) -> float | None:
        """The mean loss, or None where it was not computed."""
        if self._loss is not None:
            self._loss = _float(self._loss)
        return self._loss

    def __getitem__(self, name: str) -> Any:
        if name == "loss" and self._loss is not None:
            return self.loss
        value = self.metrics[name]
        return _plain(value) if isinstance(value, Tensor) and value.numel() == 1 else value

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*(["loss"] if self._loss is not None else []), *self.metrics]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as one flat dict of plain values; tensors become floats or lists."""
        flat: dict[str, Any] = {"kind": self.kind, "step": self.step, "loss": self.loss, "rows": self.rows, "seconds": self.seconds}
        return flat | _apart({name: _plain(value) for name, value in self.metrics.items()}, flat)

    def __repr__(self) -> str:
        numbers = [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in self.items()]
        return f"EvaluationReport(step={self.step}, {', '.join(numbers)}, rows={self.rows})"


Report: TypeAlias = "StepReport | EvaluationReport"
Logger: TypeAlias = Callable[[Report], None]
"""A logger is any function of a report; it sees the reports of steps and of evaluations alike."""


def _float(number: Number) -> float:
    return number.detach().item() if isinstance(number, Tensor) else float(number)


def _apart(metrics: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics under names that are not taken: a metric called `loss` becomes `metrics/loss`."""
    return {f"metrics/{name}" if name in taken else name: value for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Return a value without tensors or arrays, as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
