"""The benchmarks run, their results say how they were made, and the tables are what the results give. Nothing here is timed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks import tables
from benchmarks.data_parallel import run
from benchmarks.data_parallel.contenders import DDP, LIMIT, contenders
from benchmarks.data_parallel.workloads import NUM_BATCHES, WORKLOADS
from benchmarks.harness import BenchmarkError

RESULTS = sorted(Path(tables.__file__).parent.glob("*/results/*.json"))
FACTS = {
    "command",
    "commit",
    "versions",
    "hardware",
    "load",
    "started",
    "optimizer",
    "dtype",
    "seed",
    "workers",
    "threads",
    "settings",
}
TINY_CASE = ["paceline, threads", "paceline, processes", DDP]


def check_facts(result: Mapping[str, Any]) -> None:
    assert set(result) >= FACTS
    assert {"python", "torch", "numpy", "paceline"} <= set(result["versions"])
    assert {"processor", "cores", "memory_bytes", "system"} <= set(result["hardware"])


@pytest.mark.timeout(240)
def test_tiny_case_runs_end_to_end(tmp_path: Path) -> None:
    """Real processes take turns, agree on their losses, and leave a result of which a table can be made."""
    words = ["--workloads", "tiny", "--sittings", "1", "--rounds", "2", "--steps", "2", "--warm-up", "2"]
    path = run.main([*words, "--contenders", *TINY_CASE, "--results", str(tmp_path), "--name", "tiny"])
    text = path.read_text()
    assert str(tmp_path) not in text, "a result names no places"
    result = json.loads(text)
    check_facts(result)
    (sitting,) = result["workloads"]["tiny"]["sittings"]
    processes = {each.name: each.processes for each in contenders("tiny", 0, fused=False, only=TINY_CASE)}
    turns = [(turn["round"], turn["contender"], [len(seconds) for seconds in turn["seconds"]]) for turn in sitting["turns"]]
    order = [TINY_CASE, [*TINY_CASE[1:], TINY_CASE[0]]]
    assert turns == [(number, name, [2] * processes[name]) for number in range(2) for name in order[number]]
    for name, size in processes.items():
        assert len(sitting["memory"][name]) == size
        assert all(process["peak_bytes"] > process["idle_bytes"] > 0 for process in sitting["memory"][name])
        assert len(sitting["losses"][name]) == NUM_BATCHES + 1
    table = tables.data_parallel(result)
    assert all(f"| {name} |" in table for name in TINY_CASE)


def test_contenders_that_do_other_work_are_refused() -> None:
    """A contender whose losses are not those of the others makes the result void."""
    fine = [2.0] * NUM_BATCHES + [1.9]
    workload = WORKLOADS["tiny"]
    run.check_same_work(workload, {DDP: fine, "paceline, threads": fine, LIMIT: [2.0, *[7.0] * NUM_BATCHES]})
    with pytest.raises(BenchmarkError, match=r"step 4 of 'paceline, threads' has loss 2\.1"):
        run.check_same_work(workload, {DDP: fine, "paceline, threads": [2.0, 2.0, 2.0, 2.1, *fine[4:]]})
    with pytest.raises(BenchmarkError, match="step 1 of 'no communication'"):
        run.check_same_work(workload, {DDP: fine, LIMIT: [2.001, *fine[1:]]})
    with pytest.raises(BenchmarkError, match="does not learn"):
        run.check_same_work(workload, {DDP: [2.0] * (NUM_BATCHES + 1)})


def test_numbers_of_table_are_those_of_its_result() -> None:
    """Of the processes the slowest counts, of a turn the mean, and ratios are taken within a round."""
    rounds = [{"a": [[1.0, 3.0], [1.0, 1.0]], DDP: [[1.0, 1.0]]}, {DDP: [[4.0, 4.0]], "a": [[4.0, 8.0]]}]
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
    """The page shows what its results give, and every result is shown."""
    page = tables.PAGE.read_text()
    assert tables.render(page) == page, "run python -m benchmarks.tables"
    shown = {match["file"] for match in tables.MARKED.finditer(page)}
    assert shown == {path.relative_to(tables.HERE).as_posix() for path in RESULTS}
    assert RESULTS


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_says_how_it_was_made(path: Path) -> None:
    """Versions, hardware, threads, seed and command stand in every result, and its contenders did the same work."""
    result = json.loads(path.read_text())
    check_facts(result)
    settings = result["settings"]
    for name, workload in result["workloads"].items():
        assert len(workload["sittings"]) == settings["sittings"]
        for sitting in workload["sittings"]:
            run.check_same_work(WORKLOADS[name], sitting["losses"])
            assert len(sitting["turns"]) == settings["rounds"] * len(sitting["losses"])
            assert all(len(seconds) == settings["steps"] for turn in sitting["turns"] for seconds in turn["seconds"])
            assert all(len(turn["cpu_seconds"]) == len(turn["seconds"]) for turn in sitting["turns"])
