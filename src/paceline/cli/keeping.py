"""What of a run is kept, and how it is judged: the options of `paceline train` that are about checkpoints and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.weights import CHECKPOINTS
from paceline.errors import UsageError
from paceline.evaluation import Best
from paceline.job import Job

SAVE_EVERY, KEEP = 100, 3


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """The folder of a run, how often it saves and evaluates, and which evaluation is the best."""

    run: Path | None
    save_every: int | None
    keep: int
    evaluate_every: int | None
    best: Best | None

    @classmethod
    def of(
        cls,
        job: Job,
        *,
        run: Path | None,
        save_every: int | None,
        keep: int | None,
        evaluate_every: int | None,
        best: str | None,
        patience: int | None,
    ) -> Keeping:
        """Return the options of a command line.

        Raises:
            UsageError: one of them is out of range, or needs another that is not given.
        """
        for name, value in (("save-every", save_every), ("keep", keep), ("evaluate-every", evaluate_every), ("patience", patience)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value} is not at least 1")
        for name, value in (("save-every", save_every), ("keep", keep)):
            if value is not None and run is None:
                raise UsageError(f"--{name} {value} is about checkpoints, and they are kept in a run folder; pass --run DIR")
        judged = _read_best(best, patience, job)
        if judged is not None and evaluate_every is None:
            option = f"--best {best}" if best is not None else f"--patience {patience}"
            raise UsageError(f"{option} compares evaluations, and there are none in between; pass --evaluate-every N")
        if evaluate_every is not None and job.held_out is None:
            raise UsageError(f"--evaluate-every {evaluate_every} needs held-out data; give the job some: Job(held_out=...)")
        every = None if run is None else save_every or SAVE_EVERY
        return cls(run=run, save_every=every, keep=keep or KEEP, evaluate_every=evaluate_every, best=judged)

    @property
    def checkpoints(self) -> Path | None:
        """The folder that checkpoints go to; None where none are kept."""
        return None if self.run is None else self.run / CHECKPOINTS

    def for_fit(self) -> dict[str, Any]:
        """Return what `Trainer.fit` takes of it."""
        return {
            "evaluate_every": self.evaluate_every,
            "best": self.best,
            "checkpoints": self.checkpoints,
            "save_every": self.save_every,
            "keep": self.keep,
        }


def _read_best(text: str | None, patience: int | None, job: Job) -> Best | None:
    """Return which evaluation is the best by `METRIC`, `METRIC:max` or `METRIC:min`; by the loss where only a patience is given."""
    if text is None:
        return None if patience is None else Best(patience=patience)
    metric, colon, mode = text.rpartition(":") if ":" in text else (text, "", "")
    known = ["loss", *job.metrics]
    if metric not in known:
        raise UsageError(f"--best {text}: the job's evaluations have no {metric!r}; pass one of {', '.join(known)}")
    if mode not in ("min", "max") if colon else metric != "loss":
        raise UsageError(f"--best {text} does not say which value is better; pass {metric}:max or {metric}:min")
    return Best(metric=metric, mode="max" if mode == "max" else "min", patience=patience)
