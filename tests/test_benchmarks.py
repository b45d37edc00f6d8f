"""The benchmarks run, their results say how they were made, and the tables are what the results give. Nothing here is timed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tables
from benchmarks.checkpoints import run as checkpoints_run
from benchmarks.checkpoints.contenders import SNAPSHOT, TORCH_LOAD, TORCH_SAVE
from benchmarks.checkpoints.run import check_same_contents
from benchmarks.data_parallel import run as data_parallel_run
from benchmarks.data_parallel.contenders import DDP, LIMIT, ONE_PROCESS
from benchmarks.data_parallel.workloads import NUM_BATCHES, WORKLOADS
from benchmarks.harness import BenchmarkError
from benchmarks.training import Benchmark
from benchmarks.wrappers import run as wrappers_run
from benchmarks.wrappers.contenders import DATA_PARALLEL, DISTRIBUTED, ONE_THREAD

RESULTS = sorted(Path(tables.__file__).parent.glob("*/results/*.json"))
FACTS = {"command", "commit", "versions", "hardware", "load", "started", "seed", "threads", "settings", "workloads"}
TRAINING = {"data_parallel": data_parallel_run.BENCHMARK, "wrappers": wrappers_run.BENCHMARK}
TRAINING_CASES = {
    "data_parallel": ["paceline, threads", "paceline, processes", DDP],
    "wrappers": [DATA_PARALLEL, DISTRIBUTED, DDP, ONE_THREAD],
}
CHECKPOINTS_CASE = [
    "paceline Checkpoints.save",
    SNAPSHOT,
    TORCH_SAVE,
    "torch.distributed.checkpoint.save",
    "paceline Checkpoints.load",
    TORCH_LOAD,
    "torch.distributed.checkpoint.load",
]
QUICKLY = ["--workloads", "tiny", "--name", "tiny", "--quick", "--rounds", "2", "--steps", "2", "--warm-up", "1"]


def check_facts(result: Mapping[str, Any], kind: str) -> None:
    more = {"file_system"} if kind == "checkpoints" else {"optimizer", "dtype", "workers"}
    assert set(result) >= FACTS | more
    assert {"python", "torch", "numpy", "paceline"} <= set(result["versions"])
    assert {"processor", "cores", "memory_bytes", "system"} <= set(result["hardware"])


def check_turns(result: Mapping[str, Any]) -> None:
    """Every contender has had its turn in every round, and every process of it has reported every step and its memory."""
    settings, processes = result["settings"], {name: each["processes"] for name, each in result["threads"].items()}
    for workload in result["workloads"].values():
        assert len(workload["sittings"]) == settings["sittings"]
        for sitting in workload["sittings"]:
            everyone = sorted((number, name) for number in range(settings["rounds"]) for name in processes)
            assert sorted((turn["round"], turn["contender"]) for turn in sitting["turns"]) == everyone
            for turn in sitting["turns"]:
                assert [len(seconds) for seconds in turn["seconds"]] == [settings["steps"]] * processes[turn["contender"]]
                assert len(turn["cpu_seconds"]) == processes[turn["contender"]]
            for name, size in processes.items():
                assert len(sitting["memory"][name]) == size
                assert all(process["peak_bytes"] > process["idle_bytes"] > 0 for process in sitting["memory"][name])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", TRAINING)
def test_tiny_training_runs_end_to_end(kind: str, tmp_path: Path) -> None:
    """Real processes take turns, agree on their losses, and leave a result of which a table can be made."""
    case = TRAINING_CASES[kind]
    path = TRAINING[kind].main([*QUICKLY, "--contenders", *case, "--results", str(tmp_path)])
    text = path.read_text()
    assert str(tmp_path) not in text, "a result names no places"
    result = json.loads(text)
    check_facts(result, kind)
    check_turns(result)
    (sitting,) = result["workloads"]["tiny"]["sittings"]
    order = [*case, *case[1:], case[0]]
    assert [turn["contender"] for turn in sitting["turns"]] == order, "the order rotates from round to round"
    assert {name: len(losses) for name, losses in sitting["losses"].items()} == dict.fromkeys(case, NUM_BATCHES + 1)
    table = tables.BUILDERS[kind](result)
    assert all(f"| {name} |" in table for name in case)


@pytest.mark.timeout(240)
def test_tiny_checkpoints_run_end_to_end(tmp_path: Path) -> None:
    """Real processes save and load in turns, every bit comes back, and nothing stays on the disk but the result."""
    (folder := tmp_path / "saved").mkdir()
    places = ["--results", str(tmp_path), f"--folder={folder}"]
    path = checkpoints_run.main([*QUICKLY, "--contenders", *CHECKPOINTS_CASE, *places])
    assert list(folder.iterdir()) == []
    text = path.read_text()
    assert str(tmp_path) not in text, "a result names no places"
    result = json.loads(text)
    check_facts(result, "checkpoints")
    check_turns(result)
    workload = result["workloads"]["tiny"]
    (sitting,) = workload["sittings"]
    assert sitting["fingerprints"] == {name: [workload["fingerprint"]] for name in CHECKPOINTS_CASE}
    written = {name for name in CHECKPOINTS_CASE if sitting["memory"][name][0].get("file_bytes", 0) > workload["state_bytes"]}
    assert written == {"paceline Checkpoints.save", TORCH_SAVE, "torch.distributed.checkpoint.save"}
    saves, loads = tables.checkpoints(result).split("| load |")
    for name in CHECKPOINTS_CASE:
        assert f"| {name} |" in (loads if result["threads"][name]["does"] == "load" else saves)


def test_contenders_that_do_other_work_are_refused() -> None:
    """A contender whose losses are not those of the others makes the result void."""
    fine = [2.0] * NUM_BATCHES + [1.9]
    workload, benchmark = WORKLOADS["tiny"], TRAINING["data_parallel"]
    benchmark.check_same_work(workload, {DDP: fine, "paceline, threads": fine, LIMIT: [2.0, *[7.0] * NUM_BATCHES]})
    with pytest.raises(BenchmarkError, match=r"step 4 of 'paceline, threads' has loss 2\.1"):
        benchmark.check_same_work(workload, {DDP: fine, "paceline, threads": [2.0, 2.0, 2.0, 2.1, *fine[4:]]})
    with pytest.raises(BenchmarkError, match="step 1 of 'no communication'"):
        benchmark.check_same_work(workload, {DDP: fine, LIMIT: [2.001, *fine[1:]]})
    with pytest.raises(BenchmarkError, match="does not learn"):
        benchmark.check_same_work(workload, {DDP: [2.0] * (NUM_BATCHES + 1)})


@pytest.mark.parametrize("benchmark", TRAINING.values(), ids=TRAINING)
def test_whole_batches_are_excused_only_where_batchnorm_is(benchmark: Benchmark) -> None:
    """One process may lose otherwise on the model with BatchNorm, and nowhere else; a wrapper may not even there."""
    fine, other = [2.0] * NUM_BATCHES + [1.9], [2.02] * NUM_BATCHES + [1.9]
    benchmark.check_same_work(WORKLOADS["cnn"], {DDP: fine, ONE_PROCESS: other})
    with pytest.raises(BenchmarkError, match="step 1 of"):
        benchmark.check_same_work(WORKLOADS["tiny"], {DDP: fine, ONE_PROCESS: other})
    with pytest.raises(BenchmarkError, match="step 1 of"):
        benchmark.check_same_work(WORKLOADS["cnn"], {DDP: fine, DATA_PARALLEL: other})


def test_checkpoint_that_loses_a_bit_is_refused() -> None:
    """A contender that gives back something else, or nothing, makes the result void."""
    check_same_contents("tiny", 7, {TORCH_SAVE: [7.0], TORCH_LOAD: [7.0]})
    for wrong in ([8.0], []):
        with pytest.raises(BenchmarkError, match=r"what 'torch\.load' gives back"):
            check_same_contents("tiny", 7, {TORCH_SAVE: [7.0], TORCH_LOAD: wrong})


@pytest.mark.parametrize("parse", [*(each.parse for each in TRAINING.values()), checkpoints_run.parse])
def test_quick_takes_fewer_steps_unless_told_otherwise(parse: Callable[[list[str]], argparse.Namespace]) -> None:
    """`--quick` changes the settings that are not given, and no others."""
    full, quick, given = parse([]), parse(["--quick"]), parse(["--quick", "--sittings", "3"])
    assert quick.sittings * quick.rounds * quick.steps < full.sittings * full.rounds * full.steps
    assert quick.workloads == full.workloads
    assert (given.sittings, given.rounds) == (3, quick.rounds)


def test_numbers_of_table_are_those_of_its_result() -> None:
    """Of the processes the slowest counts, of a turn the mean, and ratios are taken within a round."""
    rounds = [{"a": [[1.0, 3.0], [1.0, 1.0]], DDP: [[1.0, 1.0]]}, {DDP: [[4.0, 4.0]], "a": [[4.0, 8.0]]}]
    turns = [
        {"round": number, "contender": name, "load": 0.0, "seconds": seconds}
        for number, each in enumerate(rounds)
        for name, seconds in each.items()
    ]
    workload = {"sittings": [{"turns": turns}]}
    times = tables.turn_times(workload)
    assert times == {"a": [2.0, 6.0], DDP: [1.0, 4.0]}
    assert tables.ratios(times["a"], times[DDP]) == tables.Spread(1.75, 1.625, 1.875)


def test_tables_are_up_to_date() -> None:
    """The page shows what its results give, every result is shown, and every benchmark has its place."""
    page = tables.PAGE.read_text()
    assert tables.render(page) == page, "run python -m benchmarks.tables"
    shown = {match["file"] for match in tables.MARKED.finditer(page)}
    assert shown >= {path.relative_to(tables.HERE).as_posix() for path in RESULTS}
    assert {file.split("/")[0] for file in shown} == set(tables.BUILDERS)
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.relative_to(tables.HERE).as_posix())
def test_result_says_how_it_was_made(path: Path) -> None:
    """Versions, hardware, threads, seed and command stand in every result, and its contenders did the same work."""
    result, kind = json.loads(path.read_text()), path.parent.parent.name
    check_facts(result, kind)
    check_turns(result)
    for name, workload in result["workloads"].items():
        for sitting in workload["sittings"]:
            if kind in TRAINING:
                TRAINING[kind].check_same_work(WORKLOADS[name], sitting["losses"])
                assert set(sitting["losses"]) == set(result["threads"])
            else:
                check_same_contents(name, workload["fingerprint"], sitting["fingerprints"])
                assert set(sitting["fingerprints"]) == set(result["threads"])
