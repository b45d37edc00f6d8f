"""The frame of what every rank of a group does in the tests of DistributedDataParallel."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.distributed import DistributedDataParallel
from tests.parallel.modules import x_of

ROWS = 3
Check = Callable[[int, int], None]


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **{"timeout_s": 10.0, **options})


def run_checks(rank: int, size: int, port: int, checks: list[Check]) -> dict[str, str]:
    """Run checks one after the other in one process group, and return what went wrong in each, in words."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    wrong = {}
    try:
        for check in checks:
            try:
                check(rank, size)
            except Exception as error:
                wrong[check.__name__] = "".join(traceback.format_exception(error))
            gc.collect()
            dist.barrier()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
        assert not left, left
    finally:
        dist.destroy_process_group()
    return wrong


def parts(size: int, seed: int = 1) -> list[Tensor]:
    return list(x_of(ROWS * size, seed).split(ROWS))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()
