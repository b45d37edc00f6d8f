"""A process knows which run it belongs to from its variables alone, and waits for nobody that nothing has started."""

from __future__ import annotations

import pytest

from paceline.errors import UsageError
from paceline.transport.environment import Environment, expand_tasks, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM_STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURMD_NODENAME": "gpu004",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-17",
}


def detect(variables: dict[str, str]) -> Environment:
    environment = Environment.detect(variables)
    assert environment is not None
    return environment


def test_no_variables_means_alone() -> None:
    assert Environment.detect({"HOME": "/root", "PATH": "/bin"}) is None


def test_torchrun_is_read_whole() -> None:
    assert detect(TORCHRUN) == Environment(
        rank=3,
        size=4,
        local_rank=1,
        local_size=2,
        host="GROUP_RANK=1",
        master_address="node1",
        master_port=29400,
        started_by="torchrun",
    )


def test_world_of_one_is_a_run_of_one() -> None:
    environment = detect({"RANK": "0", "WORLD_SIZE": "1"})
    assert (environment.rank, environment.size, environment.local_size) == (0, 1, 1)


def test_started_by_hand_on_one_host_shares_the_host() -> None:
    environment = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (environment.local_rank, environment.local_size) == (1, 2)


def test_started_by_hand_on_several_hosts_is_alone_on_its_own() -> None:
    environment = detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "1"})
    assert (environment.local_rank, environment.local_size) == (0, 1)


def test_slurm_step_is_read_whole() -> None:
    environment = detect(SLURM_STEP)
    assert (environment.rank, environment.size, environment.local_rank, environment.local_size) == (5, 6, 1, 2)
    assert (environment.master_address, environment.started_by) == ("gpu003", "Slurm")


def test_slurm_port_comes_from_the_job_and_is_the_same_on_all_ranks() -> None:
    port = detect(SLURM_STEP).master_port
    assert 20_000 <= port < 30_000
    assert detect({**SLURM_STEP, "SLURM_PROCID": "0"}).master_port == port
    assert detect({**SLURM_STEP, "SLURM_JOB_ID": "4712"}).master_port != port
    assert detect({**SLURM_STEP, "MASTER_PORT": "1234"}).master_port == 1234


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None},  # sbatch: the script itself
        {"SLURM_STEP_NUM_TASKS": "1"},  # salloc's or srun --pty's shell
        {"SLURM_STEP_NUM_TASKS": None},
        {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # the interactive step
        {"SLURM_STEP_ID": "batch"},
    ],
)
def test_bare_slurm_allocation_waits_for_nothing(changes: dict[str, str | None]) -> None:
    """SLURM_NTASKS and SLURM_PROCID stand there too, but nobody has started the other tasks."""
    variables = {name: value for name, value in {**SLURM_STEP, **changes}.items() if value is not None}
    assert Environment.detect(variables) is None


def test_torchrun_inside_a_slurm_step_wins() -> None:
    assert detect({**SLURM_STEP, **TORCHRUN}).started_by == "torchrun"


def test_world_size_that_a_batch_script_exported_does_not_disturb_srun() -> None:
    assert detect({**SLURM_STEP, "WORLD_SIZE": "6"}).size == 6
    with pytest.raises(UsageError, match="WORLD_SIZE=8 and SLURM_STEP_NUM_TASKS=6 differ; unset WORLD_SIZE"):
        detect({**SLURM_STEP, "WORLD_SIZE": "8"})


def test_open_mpi_and_mpich_on_one_host() -> None:
    environment = detect(OPEN_MPI)
    assert (environment.rank, environment.size, environment.local_rank, environment.master_address) == (1, 2, 1, "127.0.0.1")
    mpich = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (mpich.rank, mpich.local_size, mpich.started_by) == (1, 2, "MPICH")


def test_open_mpi_over_hosts_asks_for_the_address() -> None:
    variables = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(UsageError, match="needs MASTER_ADDR"):
        detect(variables)
    assert detect({**variables, "MASTER_ADDR": "node1"}).master_address == "node1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set without WORLD_SIZE; set both"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set without RANK; set both"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4"),
        ({**TORCHRUN, "RANK": "-1"}, "rank -1 of 4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE='' is not a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "rank 3 of 0"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT"),
        ({**SLURM_STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number"),
    ],
)
def test_half_set_variables_are_refused_in_one_line(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Environment.detect(variables)
    assert "\n" not in str(caught.value)


def test_node_lists_and_task_counts() -> None:
    assert first_host("n[1,3-5]") == "n1"
    assert first_host("n-a7") == "n-a7"
    assert first_host("a[01-02]-x,b") == "a01-x"
    assert first_host("") == ""
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("nonsense") == []
