"""Measure data parallelism over two CPU workers and write every single measurement to results/NAME.json.

From the root of the repository:

    python -m benchmarks.data_parallel.run
    python -m benchmarks.data_parallel.run --optimizer fused --name fused --workloads mlp gpt
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.data_parallel.contenders import DDP, LIMIT, ONE_PROCESS, WORKERS, contenders
from benchmarks.data_parallel.workloads import LR, NUM_BATCHES, WEIGHT_DECAY, WORKLOADS, Workload
from benchmarks.harness import JSON, BenchmarkError, facts, sitting, write

RESULTS = Path(__file__).parent / "results"
DEFAULT_WORKLOADS = ("mlp", "gpt", "gpt_10m", "cnn")
# The first loss differs by the order of additions; later ones by what AdamW makes of that where gradients are nearly zero.
FIRST_TOLERANCE, LATER_TOLERANCE = 2e-5, 2e-3
# BatchNorm over a whole batch is not BatchNorm over its halves.
WHOLE_BATCH_TOLERANCE = 0.1


def check_same_work(workload: Workload, found: Mapping[str, Sequence[float]]) -> None:
    """Raise `BenchmarkError` where the contenders' losses, with random masks off, say that they do not do the same work.

    The two processes without communication train apart, so only their first loss is compared.
    """
    reference = found[DDP]
    if len(reference) > NUM_BATCHES and not reference[NUM_BATCHES] < reference[0]:
        raise BenchmarkError(f"{workload.name}: {DDP} does not learn its first batch: {reference}")
    for name, values in found.items():
        compared = values[:1] if name == LIMIT else values
        for step, (value, expected) in enumerate(zip(compared, reference, strict=False), start=1):
            tolerance = FIRST_TOLERANCE if step == 1 else LATER_TOLERANCE
            if workload.normalises and name == ONE_PROCESS:
                tolerance = WHOLE_BATCH_TOLERANCE
            if not math.isclose(value, expected, rel_tol=tolerance):
                raise BenchmarkError(f"{workload.name}: step {step} of {name!r} has loss {value}, of {DDP!r} {expected}")


def measure(workload: Workload, arguments: argparse.Namespace) -> JSON:
    """Return all measurements of one workload, after the check that all contenders did the same work."""
    sittings = []
    for number in range(arguments.sittings):
        print(f"{workload.name}: sitting {number + 1} of {arguments.sittings}", file=sys.stderr, flush=True)
        result = sitting(
            contenders(workload.name, arguments.seed, fused=arguments.optimizer == "fused", only=arguments.contenders),
            rounds=arguments.rounds,
            steps=arguments.steps,
            settle=arguments.settle,
            warm_up=arguments.warm_up,
            check_steps=arguments.check_steps,
            check_with={"dropout": False},
            timeout_s=arguments.timeout,
        )
        check_same_work(workload, result["losses"])
        sittings.append(result)
    parameters = sum(parameter.numel() for parameter in workload.build(arguments.seed).parameters())
    return {"words": workload.words, "rows": workload.rows, "parameters": parameters, "sittings": sittings}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the settings that a command line gives."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel.run", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default=None, help="name of the result; by default that of the optimizer")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(DEFAULT_WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=None, help=f"who takes part, {DDP!r} among them; by default all")
    parser.add_argument("--optimizer", choices=("default", "fused"), default="default", help="AdamW as torch sets it up, or fused")
    parser.add_argument("--sittings", type=int, default=2, help="how often all processes are started anew")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender in a sitting")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a turn")
    parser.add_argument("--settle", type=int, default=1, help="steps at the start of each turn that are not timed")
    parser.add_argument("--warm-up", type=int, default=4, help="steps after the start that are not timed")
    parser.add_argument("--check-steps", type=int, default=NUM_BATCHES + 1, help="steps whose losses are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300.0, help="longest wait for a process, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> Path:
    """Run the benchmark and return the file of its result."""
    words = list(sys.argv[1:] if words is None else words)
    arguments = parse(words)
    everyone = contenders("", 0, fused=False, only=arguments.contenders)
    result: JSON = {
        "command": shlex.join(["python", "-m", "benchmarks.data_parallel.run", *_without_results(words)]),
        **facts(),
        "optimizer": {"kind": "AdamW", "fused": arguments.optimizer == "fused", "lr": LR, "weight_decay": WEIGHT_DECAY},
        "dtype": "float32",
        "seed": arguments.seed,
        "workers": WORKERS,
        "threads": {each.name: {"processes": each.processes, "intra_op": each.threads} for each in everyone},
        "settings": {key: getattr(arguments, key) for key in ("sittings", "rounds", "steps", "settle", "warm_up", "check_steps")},
        "workloads": {},
    }
    path: Path = arguments.results / f"{arguments.name or arguments.optimizer}.json"
    for name in arguments.workloads:  # written after each, so that what fails later costs nothing that is done
        result["workloads"][name] = measure(WORKLOADS[name], arguments)
        write(path, result)
    print(f"wrote {path.name}; now run python -m benchmarks.tables", file=sys.stderr)
    return path


def _without_results(words: list[str]) -> list[str]:
    """Return the command line without the folder of the results, which is a matter of the machine."""
    if "--results" not in words:
        return words
    place = words.index("--results")
    return words[:place] + words[place + 2 :]


if __name__ == "__main__":
    main()
