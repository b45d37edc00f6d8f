"""The same ordinary loop for everyone: zero_grad, loss, backward, clipping, step. What differs is what the model is wrapped in."""

from __future__ import annotations

from collections.abc import Collection

import torch

from benchmarks.data_parallel.contenders import DDP, LIMIT, ONE_PROCESS, WORKERS, PlainSteps, halves
from benchmarks.data_parallel.contenders import HERE as THERE
from benchmarks.data_parallel.workloads import WORKLOADS
from benchmarks.harness import Contender
from paceline import DataParallel, DistributedDataParallel

HERE = "benchmarks.wrappers.contenders"
ONE_THREAD = "one process, 1 thread"
DATA_PARALLEL = 'paceline DataParallel(devices=["cpu", "cpu"])'
DISTRIBUTED = "paceline DistributedDataParallel"


def data_parallel(rank: int, *, workload: str, seed: int, dropout: bool, fused: bool) -> PlainSteps:
    """Return the loop of one process whose wrapper deals the rows of whole batches out to replicas in threads."""
    torch.set_num_threads(1)
    each = WORKLOADS[workload]
    wrapped = DataParallel(each.build(seed, dropout=dropout), devices=["cpu"] * WORKERS)
    return PlainSteps(wrapped, each.batches(seed), clip_norm=each.clip_norm, fused=fused, leave=wrapped.close)


def distributed(rank: int, *, workload: str, seed: int, dropout: bool, fused: bool) -> PlainSteps:
    """Return the loop of one of two processes, on this rank's half of each batch."""
    torch.set_num_threads(1)
    each = WORKLOADS[workload]
    wrapped = DistributedDataParallel(each.build(seed, dropout=dropout))
    torch.manual_seed(seed + rank)  # for the masks
    half = halves(each.batches(seed), rank)
    return PlainSteps(wrapped, half, clip_norm=each.clip_norm, fused=fused, leave=wrapped.close)


def contenders(workload: str, seed: int, *, fused: bool, only: Collection[str] | None = None) -> list[Contender]:
    """Return who takes part, in the order of the tables; all, or `only` those."""
    settings = {"workload": workload, "seed": seed, "dropout": True, "fused": fused}
    everyone = [
        Contender(DATA_PARALLEL, f"{HERE}:data_parallel", 1, 1, settings),
        Contender(DISTRIBUTED, f"{HERE}:distributed", WORKERS, 1, settings, joined=True),
        Contender(DDP, f"{THERE}:ddp", WORKERS, 1, settings | {"bucket_view": False}, joined=True),
        Contender(ONE_PROCESS, f"{THERE}:one_process", 1, WORKERS, settings | {"threads": WORKERS}),
        Contender(ONE_THREAD, f"{THERE}:one_process", 1, 1, settings | {"threads": 1}),
        Contender(LIMIT, f"{THERE}:no_communication", WORKERS, 1, settings),
    ]
    return [contender for contender in everyone if only is None or contender.name in only]
