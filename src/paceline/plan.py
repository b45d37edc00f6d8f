"""How to train: a plan is a frozen value that reads and prints as one line, as TOML and as Python."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass
from typing import Any

import tomli_w

from paceline.errors import PlanError

PRECISIONS = ("fp32",)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A layout and an arithmetic for a job; what is left out is settled when the workers are known.

    Args:
        replicas: whole copies of the model that share each global batch, at least 1; None means workers / stages.
        stages: parts that each copy of the model is cut into, at least 1.
        micro_batches: slices that one forward sees, counted over the whole global batch, at least `replicas`; None leaves it
            to the job, and where the job is silent too it is `replicas` (times four with stages).
        precision: `fp32`.
        reproducible: sum in one fixed order, so that every layout gives the same bits.

    Raises:
        PlanError: a value is out of range; the message says what is allowed.

    >>> Plan.parse("replicas=2,micro_batches=4")
    Plan(replicas=2, micro_batches=4)
    >>> str(Plan(replicas=2, reproducible=True))
    'replicas=2,reproducible=true'
    """

    replicas: int | None = None
    stages: int = 1
    micro_batches: int | None = None
    precision: str = "fp32"
    reproducible: bool = False

    def __post_init__(self) -> None:
        for name in ("replicas", "stages", "micro_batches"):
            value = getattr(self, name)
            if value is None and name != "stages":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}={value!r} is not a whole number of at least 1; pass for example {name}=2")
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}; pass precision={PRECISIONS[0]}")
        if not isinstance(self.reproducible, bool):
            raise PlanError(f"reproducible={self.reproducible!r} is neither true nor false; pass reproducible=true")
        if self.replicas is not None and self.micro_batches is not None:
            check_micro_batches(self.replicas, self.micro_batches)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that a line such as `replicas=2,micro_batches=4` describes; the empty line is `Plan()`.

        Raises:
            PlanError: an unknown or doubled name, or a value that does not read.
        """
        values: dict[str, Any] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in entry.partition("="))
            if not equals or not value:
                raise PlanError(f"plan entry {entry!r} is not name=value; write for example replicas=2,micro_batches=4")
            if name in values:
                raise PlanError(f"{name} stands twice in plan {text!r}; leave one of them out")
            values[name] = _read(name, value)
        return cls._of(values)

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Return the plan that TOML text describes, with the fields' names as its keys.

        >>> Plan.from_toml(Plan(replicas=2).to_toml()) == Plan(replicas=2)
        True
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan is not valid TOML ({error}); write for example replicas = 2") from error
        return cls._of(values)

    @classmethod
    def of(cls, plan: Plan | str | None) -> Plan:
        """Return a plan given as a value, as a line of text, or not at all."""
        if plan is None:
            return cls()
        return cls.parse(plan) if isinstance(plan, str) else plan

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Plan:
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in fields:
                close = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {close[0]}?" if close else "leave it out"
                raise PlanError(f"a plan has no {name!r}; it may have {', '.join(fields)}; {hint}")
        return cls(**values)

    def set_fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, in their order."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def __str__(self) -> str:
        return ",".join(f"{name}={_write(value)}" for name, value in self.set_fields().items())

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in self.set_fields().items())})"

    def to_toml(self) -> str:
        """Return the plan as TOML, without the fields that are left open."""
        return tomli_w.dumps({name: value for name, value in dataclasses.asdict(self).items() if value is not None})

    def settle(self, workers: int | None = None, micro_batches: int | None = None) -> Plan:
        """Return the plan with nothing left open, for a number of workers (None: as many as the plan needs) and the job's default.

        Raises:
            PlanError: the plan does not fit the workers, or has more replicas than micro-batches.

        >>> Plan(stages=2).settle(workers=4)
        Plan(replicas=2, stages=2, micro_batches=8)
        """
        replicas = self.replicas
        if replicas is None:
            workers = self.stages if workers is None else workers
            if workers % self.stages:
                raise PlanError(
                    f"stages={self.stages} does not divide workers={workers}; pass a number of workers that is a multiple of stages"
                )
            replicas = workers // self.stages
        elif workers is not None and replicas * self.stages != workers:
            raise PlanError(
                f"replicas={replicas} x stages={self.stages} needs {replicas * self.stages} workers, got {workers}; "
                f"start {replicas * self.stages} workers, or leave replicas out to use them all"
            )
        micro_batches = self.micro_batches or micro_batches or replicas * (4 if self.stages > 1 else 1)
        check_micro_batches(replicas, micro_batches)
        return dataclasses.replace(self, replicas=replicas, micro_batches=micro_batches)


def check_micro_batches(replicas: int, micro_batches: int) -> None:
    """Raise `PlanError` where some replica would never have a micro-batch."""
    if replicas > micro_batches:
        raise PlanError(
            f"replicas={replicas} needs at least {replicas} micro-batches, got micro_batches={micro_batches}; "
            f"pass micro_batches={replicas} or more, or replicas={micro_batches}"
        )


def _read(name: str, value: str) -> Any:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if name in ("replicas", "stages", "micro_batches"):
        try:
            return int(value)
        except ValueError:
            raise PlanError(f"{name}={value} is not a whole number of at least 1; pass for example {name}=2") from None
    return value


def _write(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
