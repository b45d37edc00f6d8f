"""Measure saves and loads of a model with its optimizer and write every single measurement to results/NAME.json.

From the root of the repository:

    python -m benchmarks.checkpoints.run
    python -m benchmarks.checkpoints.run --quick
    python -m benchmarks.checkpoints.run --folder /somewhere --name somewhere     # on another disk
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.checkpoints.contenders import contenders, does
from benchmarks.checkpoints.subjects import KINDS, Kind
from benchmarks.harness import JSON, BenchmarkError, command, facts, sitting, with_settings, write

MODULE = "benchmarks.checkpoints.run"
RESULTS = Path(__file__).parent / "results"
DEFAULT_KINDS = ("mlp", "gpt")
FULL = {"sittings": 2, "rounds": 6, "steps": 3, "settle": 0, "warm_up": 1}
QUICK = FULL | {"sittings": 1, "steps": 2}


def check_same_contents(name: str, expected: int, found: Mapping[str, Sequence[float]]) -> None:
    """Raise `BenchmarkError` where what a contender saved or loaded is not, bit for bit, what there was to save."""
    for contender, values in found.items():
        if [int(value) for value in values] != [expected] * len(values) or not values:
            raise BenchmarkError(f"{name}: what {contender!r} gives back has the fingerprint {values}, and should have {expected}")


def measure(kind: Kind, arguments: argparse.Namespace, threads: int) -> JSON:
    """Return all measurements of one kind of subject, after the check that all contenders kept every bit."""
    subject = kind.build(arguments.seed)
    size, expected = subject.num_bytes, subject.fingerprint()
    del subject
    sittings = []
    for number in range(arguments.sittings):
        print(f"{kind.name}: sitting {number + 1} of {arguments.sittings}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="paceline-benchmark-", dir=arguments.folder) as folder:
            result = sitting(
                contenders(kind.name, arguments.seed, folder=folder, threads=threads, only=arguments.contenders),
                rounds=arguments.rounds,
                steps=arguments.steps,
                settle=arguments.settle,
                warm_up=arguments.warm_up,
                check_steps=1,
                check_with={},
                timeout_s=arguments.timeout,
            )
        result["fingerprints"] = result.pop("losses")
        check_same_contents(kind.name, expected, result["fingerprints"])
        sittings.append(result)
    return {"words": kind.words, "state_bytes": size, "fingerprint": expected, "sittings": sittings}


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on, such as `ext4`."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    found = ("", "unknown")
    for line in lines:
        _, place, kind, *_ = line.split(" ")
        if folder.resolve().is_relative_to(place) and len(place) >= len(found[0]):
            found = (place, kind)
    return found[1]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings that a command line gives."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="default", help="name of the result")
    parser.add_argument("--workloads", nargs="+", choices=sorted(KINDS), default=list(DEFAULT_KINDS))
    parser.add_argument("--contenders", nargs="+", default=None, help="who takes part; by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="where to save, a temporary folder of the system's by default")
    parser.add_argument("--timeout", type=float, default=300.0, help="longest wait for a process, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return with_settings(parser, words, FULL, QUICK)


def main(words: Sequence[str] | None = None) -> Path:
    """Run the benchmark and return the file of its result."""
    words = list(sys.argv[1:] if words is None else words)
    arguments = parse(words)
    # As many as torch takes by itself: only one contender works at a time.
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    everyone = contenders("", 0, folder="", threads=threads, only=arguments.contenders)
    result: JSON = {
        "command": command(MODULE, words, "--results", "--folder"),
        **facts(),
        "file_system": file_system(arguments.folder or Path(tempfile.gettempdir())),
        "seed": arguments.seed,
        "threads": {each.name: {"processes": each.processes, "intra_op": each.threads, "does": does(each)} for each in everyone},
        "settings": {key: getattr(arguments, key) for key in FULL},
        "workloads": {},
    }
    if result["file_system"] in ("tmpfs", "ramfs"):
        print("the folder is in memory: nothing is written to a disk; pass --folder", file=sys.stderr)
    path: Path = arguments.results / f"{arguments.name}.json"
    for name in arguments.workloads:  # written after each, so that what fails later costs nothing that is done
        result["workloads"][name] = measure(KINDS[name], arguments, threads)
        write(path, result)
    print(f"wrote {path.name}; now run python -m benchmarks.tables", file=sys.stderr)
    return path


if __name__ == "__main__":
    main()
