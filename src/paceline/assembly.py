"""From a job and a plan to this process's workers: which transport, which devices, whose weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint import load_weights, weight_misfits
from paceline.errors import Failure, PlanError, UsageError
from paceline.job import Job
from paceline.layout import Layout
from paceline.plan import Plan
from paceline.random_streams import stream_seed, use_random_stream
from paceline.transport.base import Transport
from paceline.transport.environment import Environment
from paceline.transport.threads import ThreadsTransport
from paceline.transport.torch_distributed import TorchDistributedTransport
from paceline.worker.gradients import BucketedGradients, Gradients, LocalGradients, OrderedGradients
from paceline.worker.masks import ProcessMasks, SharedDraws, ThreadMasks
from paceline.worker.objective import Objective, build_optimizer, copy_optimizer, held_by
from paceline.worker.replica import check_initialised, replicate
from paceline.worker.running import OneWorker, Workers, WorkerThreads, available_cores
from paceline.worker.same_model import check_same_model
from paceline.worker.worker import Worker

TRANSPORTS = ("threads", "processes")
Devices: TypeAlias = "str | Sequence[str | torch.device] | None"


@dataclass(frozen=True)
class Assembly:
    """This process's workers and what was settled on the way; `intra_op_threads` is None where torch's own setting stays."""

    workers: Workers
    plan: Plan
    layout: Layout
    transport: str
    intra_op_threads: int | None
    started_by: str


def assemble(job: Job, plan: Plan, *, transport: str | None, devices: Devices, timeout_s: float, traced: bool) -> Assembly:
    """Return the workers that this process runs for a plan.

    In a process that torchrun, Slurm or the like started it is one worker, and every process must call this; elsewhere all of them.

    Raises:
        UsageError: the plan does not fit the workers, the devices or the job.
        MismatchError: the processes do not hold the same model.
    """
    environment = Environment.detect(os.environ)
    where = _transport(transport, environment)
    if plan.stages > 1:
        raise PlanError(f"stages={plan.stages}: this version does not cut models yet; pass stages=1")
    if where == "processes":
        return _join(job, plan, environment, devices, timeout_s, traced)
    return _start_threads(job, plan, devices, timeout_s, traced)


def _transport(transport: str | None, environment: Environment | None) -> str:
    grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    joined = grouped or (environment is not None and environment.size > 1)
    if transport is None:
        return "processes" if joined else "threads"
    if transport not in TRANSPORTS:
        raise UsageError(f"transport={transport!r} is not one of {', '.join(TRANSPORTS)}")
    if transport == "processes" and not joined:
        raise UsageError(
            "transport='processes' needs worker processes, and this one is alone; start the script with "
            "torchrun --nproc-per-node N, or use paceline train, or leave transport out to use worker threads"
        )
    if transport == "threads" and joined:
        raise UsageError("transport='threads' was given in one of several worker processes; leave it out, or start one process")
    return transport


def _join(job: Job, plan: Plan, environment: Environment | None, devices: Devices, timeout_s: float, traced: bool) -> Assembly:
    """Become one of several worker processes."""
    size = dist.get_world_size() if dist.is_initialized() else environment.size if environment is not None else 1
    local_rank = environment.local_rank if environment is not None else 0
    local_size = environment.local_size if environment is not None else size
    plan = plan.settle(size, job.micro_batches)
    layout = _layout(job, plan)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        raise UsageError(f"devices={list(devices)!r} is a list, and each worker process has one device; pass one, or leave it out")
    use_cuda = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    device = torch.device(devices if devices is not None else f"cuda:{local_rank}" if use_cuda else "cpu")
    end = TorchDistributedTransport(timeout_s=timeout_s, device=device, environment=environment)
    try:
        threads = _intra_op_threads(job, plan, local_size)
        if threads is not None:
            torch.set_num_threads(threads)
        model = build_model(job).to(device)
        objectives = _objectives(job, model, plan, end, None, owner=None)
        check_same_model(model, end)
        worker = Worker(job, model, objectives, end, layout, device, masks=ProcessMasks(), shared_weights=False, traced=traced)
    except BaseException as error:
        end.fail(Failure.of(error, rank=end.rank, doing="making the workers"))
        end.close()
        raise
    started_by = environment.started_by if environment is not None else "torch.distributed"
    return Assembly(OneWorker(worker), plan, layout, "processes", threads, started_by)


def _start_threads(job: Job, plan: Plan, devices: Devices, timeout_s: float, traced: bool) -> Assembly:
    """Make all workers of the plan here."""
    places = _devices(plan, devices)
    plan = plan.settle(len(places) if places is not None else None, job.micro_batches)
    layout = _layout(job, plan)
    size = len(layout.places)
    places = places or [torch.device("cpu")] * size
    shared = size > 1 and all(place.type == "cpu" for place in places)
    ends = ThreadsTransport.group(size, timeout_s=timeout_s)
    first_model = build_model(job).to(places[0])
    shared_draws = SharedDraws()
    workers: list[Worker] = []
    for end, place in zip(ends, places, strict=True):
        model = first_model if end.rank == 0 else replicate(first_model, place)
        first = workers[0] if workers else None
        objectives = _objectives(job, model, plan, end, first, owner=0 if shared else None)
        masks = ProcessMasks() if size == 1 else ThreadMasks(shared_draws)
        workers.append(Worker(job, model, objectives, end, layout, place, masks=masks, shared_weights=shared, traced=traced))
    threads = _intra_op_threads(job, plan, size)
    if size == 1:
        if threads is not None:
            torch.set_num_threads(threads)
        return Assembly(OneWorker(workers[0]), plan, layout, "threads", threads, "this process")
    return Assembly(WorkerThreads(workers, shared_draws, threads), plan, layout, "threads", threads, "this process")


def _devices(plan: Plan, devices: Devices) -> list[torch.device] | None:
    """Return one device for each worker thread; None for as many CPU workers as the plan asks for."""
    if isinstance(devices, str):
        devices = [devices] * ((plan.replicas or 1) * plan.stages)
    if devices is not None:
        return [torch.device(device) for device in devices]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = (plan.replicas or gpus) * plan.stages
    return [torch.device("cuda", index) for index in range(wanted)] if 0 < wanted <= gpus else None


def _layout(job: Job, plan: Plan) -> Layout:
    assert plan.replicas is not None
    assert plan.micro_batches is not None
    if job.sync_batchnorm and plan.micro_batches != plan.replicas:
        raise PlanError(
            f"sync_batchnorm normalises over one micro-batch per replica, got micro_batches={plan.micro_batches} for "
            f"replicas={plan.replicas}; pass micro_batches={plan.replicas}"
        )
    return Layout.of(replicas=plan.replicas, stages=plan.stages, micro_batches=plan.micro_batches)


def _intra_op_threads(job: Job, plan: Plan, local_workers: int) -> int | None:
    """Return the threads of each worker's operators, which change bits: in reproducible mode 1, unless the job says otherwise."""
    if job.intra_op_threads is not None or plan.reproducible:
        return job.intra_op_threads or 1
    return None if local_workers == 1 else max(1, available_cores() // local_workers)


def build_model(job: Job) -> nn.Module:
    """Return the job's module, built in the job's own random stream where it is a function."""
    if isinstance(job.model, nn.Module):
        model = job.model
    else:
        with use_random_stream(stream_seed("model", job.seed)):
            model = job.model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"the function {job.model!r} returned {model!r}; return an nn.Module")
    check_initialised(model)
    if job.weights is not None:
        weights = load_weights(job.weights)
        misfits = weight_misfits(weights, model.state_dict())
        if misfits:
            shown, path = "; ".join(str(misfit) for misfit in misfits[:5]), os.fspath(job.weights)
            raise UsageError(f"weights={path!r} are not those of {type(model).__name__}: {shown}; nothing was loaded")
        model.load_state_dict(weights)
    return model


def _objectives(job: Job, model: nn.Module, plan: Plan, end: Transport, first: Worker | None, owner: int | None) -> list[Objective]:
    """Return the job's losses for one worker; `first` is the worker of this process that was made before it."""
    objectives = []
    parameters = dict(model.named_parameters())
    for index, (name, loss) in enumerate(job.losses.items()):
        make = job.optimizers[name]
        optimizer: Optimizer | None
        if first is None or first.objectives[index].optimizer is None:
            optimizer = build_optimizer(make, model, name)
            held = held_by(optimizer, model)
        else:
            leader = first.objectives[index]
            held = list(leader.parameters)
            assert leader.optimizer is not None
            optimizer = copy_optimizer(leader.optimizer, first.model, model) if owner is None else None
        own = {key: parameters[key] for key in held}
        if not any(parameter.requires_grad for parameter in own.values()):
            raise UsageError(
                f"all {len(own)} parameters of the optimizer of {name!r} are frozen, so there is nothing to train; "
                "unfreeze some with requires_grad_(True)"
            )
        objectives.append(Objective(name, loss, own, optimizer, _gradients(job, name, own, plan, end, owner)))
    return objectives


def _gradients(job: Job, name: str, own: dict[str, nn.Parameter], plan: Plan, end: Transport, owner: int | None) -> Gradients:
    if plan.reproducible and plan.micro_batches != 1:
        return OrderedGradients(name, own, end, owner)
    if end.size == 1:
        return LocalGradients(name, own, end, owner)
    # Synchronised BatchNorm exchanges within the backward: buckets that leave there too might pass it on one rank only.
    return BucketedGradients(name, own, end, owner, overlap=not job.sync_batchnorm)
