"""What commands take in common: a job, a plan, workers, and where those run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PlanError, UsageError
from paceline.job import Job
from paceline.jobs import find_job
from paceline.plan import Plan
from paceline.transport.environment import Environment

TRANSPORTS = ("processes", "threads")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A job and a plan that fit each other, and the workers to run them.

    `start` says what this process has to do: `here` run all workers, `join` a run that something else started, or start
    `processes` that will.
    """

    job: Job
    plan: Plan
    num_workers: int
    start: Literal["here", "join", "processes"]

    @classmethod
    def of(
        cls,
        job: str,
        *,
        plan: str | None,
        plan_file: Path | None,
        transport: str | None,
        workers: int | None,
        changes: dict[str, Any],
    ) -> Choices:
        """Return the choices of a command line; `changes` are fields of the job to replace.

        Raises:
            UsageError: one of them cannot be honoured, or they do not fit each other.
        """
        if transport is not None and transport not in TRANSPORTS:
            raise UsageError(f"--transport {transport} is not one of {', '.join(TRANSPORTS)}; pass --transport {TRANSPORTS[0]}")
        if workers is not None and workers < 1:
            raise UsageError(f"--workers {workers} is not at least 1; leave it out to start as many as the plan needs")
        read = _read_plan(plan, plan_file)
        environment = Environment.detect(os.environ)
        found = find_job(job)
        found = dataclasses.replace(found, **changes)
        if environment is not None:
            # Only the starter of a run of several processes can decide how many there are, and that they are processes.
            started = f"{environment.size} processes that {environment.started_by} started"
            if workers not in (None, environment.size):
                raise UsageError(f"--workers {workers} contradicts the {started}; leave it out")
            if transport == "threads" and environment.size > 1:
                raise UsageError(f"--transport threads contradicts the {started}; leave it out")
            settled = read.settle(environment.size, found.micro_batches)
            _check_rows(found, settled)
            return cls(job=found, plan=settled, num_workers=environment.size, start="join")
        settled = read.settle(workers, found.micro_batches)
        _check_rows(found, settled)
        num_workers = (settled.replicas or 1) * settled.stages
        here = num_workers == 1 or transport == "threads"
        return cls(job=found, plan=settled, num_workers=num_workers, start="here" if here else "processes")


def _check_rows(job: Job, plan: Plan) -> None:
    rows = job.batch_size or getattr(job.data, "batch_size", None)
    if rows is not None and plan.replicas is not None and plan.replicas > rows:
        raise PlanError(
            f"replicas={plan.replicas} needs at least {plan.replicas} rows in a batch, got batch_size={rows}; "
            f"pass --batch-size {plan.replicas} or more, or replicas={rows}"
        )


def _read_plan(plan: str | None, plan_file: Path | None) -> Plan:
    if plan_file is None:
        return Plan.of(plan)
    if plan is not None:
        raise PlanError(f"--plan {plan} and --plan-file {plan_file} are both given; leave one of them out")
    try:
        return Plan.from_toml(plan_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read plan file {plan_file} ({error}); pass one such as a run folder's plan.toml") from error
