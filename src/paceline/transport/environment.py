"""What a process can tell from its variables about the run that it was started in: torchrun, Slurm, Open MPI, MPICH.

Nothing here connects or waits. A Slurm allocation without `srun` is not a run of several processes: it waits for nobody.
"""

from __future__ import annotations

import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError

LOCALHOST = "127.0.0.1"
# Below the ports that Linux hands out by itself (32768 and up), so that one derived from a job's id is rarely taken.
FIRST_PORT, NUM_PORTS = 20_000, 10_000
# Slurm's ids of the steps that are no srun of the user's: the pending, external, batch and interactive ones.
FIRST_SPECIAL_STEP = 0xFFFFFFF0
# What Paceline's own launcher calls its runs; it uses torchrun's agent and variables.
RUN_ID_PREFIX = "paceline-"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One process of a run that something else started.

    `host` is equal for processes of one host; `master_address` and `master_port` are where rank 0 listens.

    >>> Environment.detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).rank
    1
    >>> Environment.detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    True
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    master_address: str
    master_port: int
    started_by: str

    def __post_init__(self) -> None:
        for name, rank, size in (("rank", self.rank, self.size), ("local rank", self.local_rank, self.local_size)):
            if size < 1 or not 0 <= rank < size:
                raise UsageError(
                    f"{self.started_by} set {name} {rank} of {size}; a rank is at least 0 and below the size: "
                    f"correct the variables, or unset them to run alone"
                )

    @classmethod
    def detect(cls, variables: Mapping[str, str]) -> Environment | None:
        """Return the run that `variables` describe, or None where this process stands alone.

        Raises:
            UsageError: the variables are half set, not numbers, or contradict each other.
        """
        if "RANK" in variables:
            return _torchrun(variables)
        if _is_slurm_step(variables):
            return _slurm(variables)
        for kind, names in MPI.items():
            if names[0] in variables and names[1] in variables:
                return _mpi(variables, kind, *names)
        if "WORLD_SIZE" in variables:
            raise _half_set("WORLD_SIZE", variables["WORLD_SIZE"], "RANK")
        return None


# By name: the variables of rank, size, local rank, local size, and of what tells two runs on one host apart.
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"),
}


def _torchrun(variables: Mapping[str, str]) -> Environment:
    if "WORLD_SIZE" not in variables:
        raise _half_set("RANK", variables["RANK"], "WORLD_SIZE")
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    if size > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
        if missing:
            raise UsageError(
                f"WORLD_SIZE={size} is set without {' and '.join(missing)}; set them to where rank 0 listens (torchrun does)"
            )
    address = variables.get("MASTER_ADDR") or LOCALHOST
    # Started by hand, without local ranks: only a loopback address says that all processes share this host.
    local = (rank, size) if size == 1 or address in ("localhost", LOCALHOST, "::1") else (0, 1)
    return Environment(
        rank=rank,
        size=size,
        local_rank=_number(variables, "LOCAL_RANK", local[0]),
        local_size=_number(variables, "LOCAL_WORLD_SIZE", max(local[1], _number(variables, "LOCAL_RANK", 0) + 1)),
        host=_host(variables, "GROUP_RANK"),
        master_address=address,
        master_port=_number(variables, "MASTER_PORT", 0),
        started_by=_elastic_starter(variables.get("TORCHELASTIC_RUN_ID")),
    )


def _elastic_starter(run_id: str | None) -> str:
    if run_id is None:
        return "RANK and WORLD_SIZE"
    return "paceline" if run_id.startswith(RUN_ID_PREFIX) else "torchrun"


def _is_slurm_step(variables: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several; the shell of salloc and the script of sbatch are not."""
    step, tasks = variables.get("SLURM_STEP_ID", ""), variables.get("SLURM_STEP_NUM_TASKS", "")
    return (
        step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and tasks.isdecimal() and int(tasks) > 1 and "SLURM_PROCID" in variables
    )


def _slurm(variables: Mapping[str, str]) -> Environment:
    size = _number(variables, "SLURM_STEP_NUM_TASKS")
    if "WORLD_SIZE" in variables and _number(variables, "WORLD_SIZE") != size:
        raise UsageError(
            f"WORLD_SIZE={variables['WORLD_SIZE']} and SLURM_STEP_NUM_TASKS={size} differ; unset WORLD_SIZE, srun sets the size"
        )
    rank, local_rank = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_LOCALID", 0)
    node = _number(variables, "SLURM_NODEID", 0)
    tasks = expand_tasks(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    address = variables.get("MASTER_ADDR") or first_host(nodes)
    if not address:
        raise UsageError("srun set neither SLURM_STEP_NODELIST nor SLURM_NODELIST; set MASTER_ADDR to the host of rank 0")
    run = f"{variables.get('SLURM_JOB_ID', '')}.{variables['SLURM_STEP_ID']}"
    return Environment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=tasks[node] if node < len(tasks) else local_rank + 1,
        host=_host(variables, "SLURMD_NODENAME"),
        master_address=address,
        master_port=_number(variables, "MASTER_PORT", _port_of(run)),
        started_by="Slurm",
    )


def _mpi(variables: Mapping[str, str], kind: str, rank: str, size: str, local_rank: str, local_size: str, run: str) -> Environment:
    num_ranks, num_local = _number(variables, size), _number(variables, local_size, 1)
    address = variables.get("MASTER_ADDR") or (LOCALHOST if num_local == num_ranks else "")
    if not address:
        raise UsageError(
            f"{size}={num_ranks} over several hosts needs MASTER_ADDR; set it to the host of rank 0, "
            "for example mpirun -x MASTER_ADDR=node1"
        )
    return Environment(
        rank=_number(variables, rank),
        size=num_ranks,
        local_rank=_number(variables, local_rank, 0),
        local_size=num_local,
        host=_host(variables),
        master_address=address,
        master_port=_number(variables, "MASTER_PORT", _port_of(variables.get(run, kind))),
        started_by=kind,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[003-005,7],cpu1"), first_host("a1,a2"), first_host("rack[2,4]node[10-12]-ib")
    ('gpu003', 'a1', 'rack2node10-ib')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""


def expand_tasks(counts: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's short form; empty where it does not read.

    >>> expand_tasks("4(x2),3")
    [4, 4, 3]
    """
    tasks: list[int] = []
    for entry in filter(None, counts.split(",")):
        read = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if read is None:
            return []
        tasks += [int(read[1])] * int(read[2] or 1)
    return tasks


def _half_set(name: str, value: str, missing: str) -> UsageError:
    return UsageError(f"{name}={value} is set without {missing}; set both (torchrun does), or neither to run alone")


def _port_of(run: str) -> int:
    """Return a port that all processes of a run agree on and other runs rarely share."""
    return FIRST_PORT + zlib.crc32(run.encode()) % NUM_PORTS


def _host(variables: Mapping[str, str], *names: str) -> str:
    return next((f"{name}={variables[name]}" for name in names if name in variables), platform.node())


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"{name}={text!r} is not a whole number; correct it, or unset the variables of the launcher to run alone"
        ) from None
