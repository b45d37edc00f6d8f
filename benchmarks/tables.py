"""Build the tables of README.md from the results, or check that they are up to date.

python -m benchmarks.tables            write them
python -m benchmarks.tables --check    exit with 1 where they are not what the results give
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
MARKED = re.compile(r"(<!-- table: (?P<file>\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
REFERENCES = {"torch DDP": "DDP", "one process, 1 thread": "1 thread", "no communication": "limit"}
SAVE_REFERENCES = {"torch.save, fsync": "torch.save, fsync", "writing the bytes, fsync": "limit"}
LOAD_REFERENCES = {"torch.load": "torch.load", "reading the bytes": "limit"}


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of at least one number.

        >>> Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
        Spread(median=3.0, low=2.0, high=4.0)
        """
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


def turn_times(workload: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return each contender's seconds per step, one number for each turn, in the order of the turns.

    A turn's number is the mean over its steps, so that what happens only now and then counts too; of its processes the slowest.
    """
    times: dict[str, list[float]] = {}
    for sitting in workload["sittings"]:
        for turn in sorted(sitting["turns"], key=lambda turn: turn["round"]):
            slowest = max(statistics.fmean(seconds) for seconds in turn["seconds"])
            times.setdefault(turn["contender"], []).append(slowest)
    return times


def cpu_times(workload: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return each contender's processor seconds per step, its processes and threads together, one number for each turn."""
    times: dict[str, list[float]] = {}
    for sitting in workload["sittings"]:
        for turn in sitting["turns"]:
            times.setdefault(turn["contender"], []).append(sum(turn["cpu_seconds"]) / len(turn["seconds"][0]))
    return times


def ratios(mine: Sequence[float], reference: Sequence[float]) -> Spread:
    """Return the spread of a contender's times over those of another in the same rounds."""
    return Spread.of([a / b for a, b in zip(mine, reference, strict=True)])


def memory(workload: Mapping[str, Any], contender: str) -> tuple[float, float, float]:
    """Return MB: the highest peak of a process, the sum of the peaks, and the sum of what lies above the idle processes."""
    highest, total, above = 0.0, 0.0, 0.0
    for sitting in workload["sittings"]:
        processes = sitting["memory"][contender]
        highest = max(highest, *(process["peak_bytes"] for process in processes))
        total = max(total, sum(process["peak_bytes"] for process in processes))
        above = max(above, sum(process["peak_bytes"] - process["idle_bytes"] for process in processes))
    return highest / 1e6, total / 1e6, above / 1e6


def training(result: Mapping[str, Any]) -> str:
    """Return the tables of a result of benchmarks/data_parallel or benchmarks/wrappers."""
    fused = ", fused" if result["optimizer"]["fused"] else " as torch sets it up by default"
    conditions = _conditions(result, f"{result['dtype']}, AdamW{fused}, seed {result['seed']}")
    return "\n".join([conditions, *(_workload(name, each) for name, each in result["workloads"].items())])


def checkpoints(result: Mapping[str, Any]) -> str:
    """Return the tables of a result of benchmarks/checkpoints."""
    conditions = _conditions(result, f"{result['file_system']}, float32, seed {result['seed']}")
    return "\n".join([conditions, *(_saves_and_loads(name, each, result) for name, each in result["workloads"].items())])


def _conditions(result: Mapping[str, Any], particulars: str) -> str:
    hardware, versions, settings = result["hardware"], result["versions"], result["settings"]
    loads = [turn["load"] for each in result["workloads"].values() for sitting in each["sittings"] for turn in sitting["turns"]]
    load = Spread.of(loads)
    busy = (
        "**The machine was busy with other work.** Step times and ratios tell little then: a contender that keeps one core busy "
        "suffers less than one that needs two at once, and threads that wait by spinning suffer most. CPU time and memory hold.\n"
    )
    return (
        f"`{result['command']}` on {result['started'][:10]}, commit {result['commit'] or '(none yet)'}; "
        f"Python {versions['python']}, torch {versions['torch']}, Paceline {versions['paceline']}; {hardware['cores']} cores of "
        f"{hardware['processor']}, {hardware['memory_bytes'] / 2**30:.0f} GiB, {hardware['system']}; {particulars}. "
        f"{settings['sittings']} sitting{'s' * (settings['sittings'] != 1)} of {settings['rounds']} rounds, "
        f"{settings['steps']} timed steps a turn. The machine's load average during the turns: median {load.median:.1f}, quartiles "
        f"{load.low:.1f} to {load.high:.1f}; on an otherwise idle machine of 2 cores the benchmark alone makes it 3 to 4.\n"
        + (f"\n{busy}" if load.median > 2.5 * hardware["cores"] else "")
    )


def _workload(name: str, workload: Mapping[str, Any]) -> str:
    times = turn_times(workload)
    references = {short: times[full] for full, short in REFERENCES.items() if full in times}
    processor = cpu_times(workload)
    head = ["", "step, ms", *(f"of {short}" for short in references), "CPU time, ms"]
    head += ["peak per process, MB", "in total, MB", "above idle, MB"]
    lines = [
        f"**{name}**: {workload['words']}; {workload['parameters'] / 1e6:.1f} M parameters, {workload['rows']} rows a step.\n",
        f"| {' | '.join(head)} |",
        f"| --- |{' ---: |' * (len(head) - 1)}",
    ]
    for contender, numbers in times.items():
        spread = Spread.of([1e3 * number for number in numbers])
        cells = [contender, _spread(spread, 1 if spread.median >= 10 else 2)]
        cells += [_spread(ratios(numbers, reference), 2) for reference in references.values()]
        cells.append(_spread(Spread.of([1e3 * number for number in processor[contender]]), 1 if spread.median >= 10 else 2))
        cells += [f"{number:.0f}" for number in memory(workload, contender)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _saves_and_loads(name: str, workload: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    size = workload["state_bytes"] / 1e6
    return "\n".join(
        [
            f"**{name}**: {workload['words']}; {size:.1f} MB of tensors.\n",
            *_checkpoint_table(workload, result, "save", "pause, ms", SAVE_REFERENCES),
            "",
            *_checkpoint_table(workload, result, "load", "load, ms", LOAD_REFERENCES),
            "",
        ]
    )


def _checkpoint_table(
    workload: Mapping[str, Any], result: Mapping[str, Any], does: str, title: str, references: Mapping[str, str]
) -> list[str]:
    """Return a table's lines: `does` is whether it is of saves or of loads, `references` what is compared with."""
    times = {name: of for name, of in turn_times(workload).items() if result["threads"][name]["does"] == does}
    processor, compared = cpu_times(workload), {short: times[full] for full, short in references.items() if full in times}
    sizes = ["on disk, MB"] if does == "save" else []
    head = [does, title, *(f"of {short}" for short in compared), "CPU time, ms", *sizes, "memory on top, MB"]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for contender, numbers in times.items():
        noted = [sitting["memory"][contender][0] for sitting in workload["sittings"]]
        spread = Spread.of([1e3 * number for number in numbers])
        digits = 1 if spread.median >= 10 else 2
        cells = [contender, _spread(spread, digits)]
        cells += [_spread(ratios(numbers, reference), 2) for reference in compared.values()]
        cells.append(_spread(Spread.of([1e3 * number for number in processor[contender]]), digits))
        if sizes:
            written = max(note.get("file_bytes", 0) for note in noted)
            cells.append(f"{written / 1e6:.1f}" if written else "")
        cells.append(f"{max(note['peak_bytes'] - note['built_bytes'] for note in noted) / 1e6:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


BUILDERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data_parallel": training,
    "wrappers": training,
    "checkpoints": checkpoints,
}


def render(page: str, folder: Path = HERE) -> str:
    """Return a page with every marked table built from the result that its marker names, `KIND/results/NAME.json`.

    A marker whose result is not there says so.
    """

    def build(match: re.Match[str]) -> str:
        kind = match["file"].split("/")[0]
        file = folder / match["file"]
        table = BUILDERS[kind](json.loads(file.read_text())) if file.exists() else f"Not measured yet: `{kind}` has no result.\n"
        return f"{match[1]}{table}{match[3]}"

    return MARKED.sub(build, page)


def main(words: Sequence[str] | None = None) -> int:
    """Write the tables, or say whether they are up to date."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description="Build the tables of README.md from the results."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is not up to date")
    arguments = parser.parse_args(words)
    page = PAGE.read_text()
    built = render(page)
    if arguments.check and built != page:
        print("benchmarks/README.md is not what its results give; run python -m benchmarks.tables", file=sys.stderr)
        return 1
    if not arguments.check:
        PAGE.write_text(built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
