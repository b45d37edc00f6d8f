"""Between a running trainer's workers and a saved state: what is taken, what is put back, and what would not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.assembly import Assembly
from paceline.checkpoint import (
    State,
    fits,
    group_names,
    load_optimizer,
    optimizer_state,
    random_states,
    set_random_states,
)
from paceline.job import Job
from paceline.worker.objective import Objective
from paceline.worker.worker import Worker

# What a run's numbers depend on; where one of these differs, the run that goes on is another one.
NUMBERS = ("micro_batches", "batch_size", "seed", "precision", "reproducible", "intra_op_threads")
# What a place in the middle of an epoch means something by.
ORDER = ("batch_size", "seed", "num_samples", "shuffle", "drop_last")


def facts_of(assembly: Assembly, job: Job, batch_size: int | None, num_samples: int | None) -> dict[str, Any]:
    """Return what a run is made of, in plain values, to be compared when it goes on."""
    plan = assembly.plan
    return {
        "plan": str(plan),
        "micro_batches": plan.micro_batches,
        "precision": plan.precision,
        "reproducible": plan.reproducible,
        "workers": len(assembly.layout.places),
        "intra_op_threads": assembly.intra_op_threads or torch.get_num_threads(),
        "seed": job.seed,
        "batch_size": batch_size,
        "num_samples": num_samples,
        "shuffle": job.shuffle,
        "drop_last": job.drop_last,
        "job": job.describe(),
        "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
    }


def take_state(assembly: Assembly, progress: dict[str, Any], objects: Mapping[str, Any], facts: dict[str, Any]) -> State:
    """Return the state of a run as its first worker holds it; its tensors are the run's own, not copies."""
    worker = assembly.workers.workers[0]
    named = list(worker.model.named_parameters())
    updating = [objective for objective in worker.objectives if objective.optimizer is not None]
    return State(
        weights=worker.model.state_dict(),
        optimizers={o.name: optimizer_state(o.optimizer, named) for o in updating if o.optimizer is not None},
        schedulers={o.name: saved for o in updating if (saved := o.schedule_state()) is not None},
        progress=progress,
        random=random_states(),
        objects={name: thing.state_dict() for name, thing in objects.items()},
        facts=facts,
    )


def _misfits(assembly: Assembly, state: State, objects: Mapping[str, Any]) -> list[str]:
    worker = assembly.workers.workers[0]
    named = list(worker.model.named_parameters())
    groups = {o.name: group_names(o.optimizer, named) for o in worker.objectives if o.optimizer is not None}
    problems = [str(misfit) for misfit in fits(state, worker.model.state_dict(), groups)]
    kinds = {o.name: type(o.optimizer).__name__ for o in worker.objectives if o.optimizer is not None}
    problems += [
        f"the optimizer of {name!r} is {kind}, the checkpoint's is {state.optimizers[name].kind}"
        for name, kind in kinds.items()
        if name in state.optimizers and state.optimizers[name].kind != kind
    ]
    problems += [f"the object {name!r} has no saved state" for name in objects if name not in state.objects]
    strangers = [name for name in state.objects if name not in objects]
    problems += [f"the saved object {name!r} is not named here; pass Trainer(objects=...)" for name in strangers]
    return problems


def find_problems(
    assembly: Assembly, state: State, objects: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return everything that keeps a state from being this run's, and remarks on what differs but can go on."""
    problems = _misfits(assembly, state, objects)
    if state.progress.get("batch"):
        problems += [
            f"it stopped within an epoch with {name}={state.facts[name]!r}, and {name}={facts[name]!r} puts other batches there"
            for name in ORDER
            if name in state.facts and state.facts[name] != facts.get(name)
        ]
    remarks = []
    if state.facts.get("plan") != facts["plan"]:
        remarks.append(f"saved under {state.facts.get('plan')}, goes on under {facts['plan']}")
    remarks += [
        f"{name} was {state.facts[name]!r} and is {facts[name]!r}: the run goes on, but not to the same numbers"
        for name in NUMBERS
        # Without a fixed order of sums, threads change no more than the layout does: rounding.
        if (name != "intra_op_threads" or facts["reproducible"]) and state.facts.get(name, facts[name]) != facts[name]
    ]
    return problems, remarks


def put_back(assembly: Assembly, state: State, objects: Mapping[str, Any], total_steps: int | None) -> None:
    """Load a state that fits into all of this process's workers."""
    for worker in assembly.workers.workers:
        worker.model.load_state_dict(state.weights)
        for objective in worker.objectives:
            if objective.optimizer is not None:
                _put_back_optimizer(worker, objective, state)
        if total_steps is not None:
            worker.schedule(total_steps)
    for name, thing in objects.items():
        thing.load_state_dict(state.objects[name])
    if state.random:
        set_random_states(state.random)


def _put_back_optimizer(worker: Worker, objective: Objective, state: State) -> None:
    saved = state.optimizers[objective.name]

    def load() -> None:
        assert objective.optimizer is not None
        load_optimizer(objective.optimizer, worker.model.named_parameters(), saved)

    objective.put_back(load, state.schedulers.get(objective.name))
