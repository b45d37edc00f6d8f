"""The command of a benchmark in which contenders train the same model on the same batches in turns."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_parallel.contenders import DDP, WORKERS
from benchmarks.data_parallel.workloads import LR, NUM_BATCHES, WEIGHT_DECAY, WORKLOADS, Workload
from benchmarks.harness import JSON, BenchmarkError, Contender, command, facts, sitting, with_settings, write

# The first loss differs by the order of additions; later ones by what AdamW makes of that where gradients are nearly zero.
FIRST_TOLERANCE, LATER_TOLERANCE = 2e-5, 2e-3
# BatchNorm over a whole batch is not BatchNorm over its halves.
WHOLE_BATCH_TOLERANCE = 0.1
FULL = {"sittings": 2, "rounds": 6, "steps": 5, "settle": 1, "warm_up": 4, "check_steps": NUM_BATCHES + 1}


@dataclass(frozen=True)
class Benchmark:
    """Who trains what.

    Args:
        module: the command is `python -m MODULE`.
        description: what the command does, in a line.
        contenders: function of a workload's name and a seed that returns who takes part, torch's DDP among them.
        workloads: names of the workloads that are measured by default.
        quick: the settings of `--quick`.
        results: folder of the results.
        apart: contenders that train apart, whose losses are their own after the first step.
        whole: contenders that take whole batches, which BatchNorm notices.
    """

    module: str
    description: str
    contenders: Callable[..., list[Contender]]
    workloads: tuple[str, ...]
    quick: Mapping[str, int]
    results: Path
    apart: Collection[str]
    whole: Collection[str]

    def check_same_work(self, workload: Workload, found: Mapping[str, Sequence[float]]) -> None:
        """Raise `BenchmarkError` where the contenders' losses, with random masks off, say that they do not do the same work."""
        reference = found[DDP]
        if len(reference) > NUM_BATCHES and not reference[NUM_BATCHES] < reference[0]:
            raise BenchmarkError(f"{workload.name}: {DDP} does not learn its first batch: {reference}")
        for name, values in found.items():
            compared = values[:1] if name in self.apart else values
            for step, (value, expected) in enumerate(zip(compared, reference, strict=False), start=1):
                tolerance = FIRST_TOLERANCE if step == 1 else LATER_TOLERANCE
                if workload.normalises and name in self.whole:
                    tolerance = WHOLE_BATCH_TOLERANCE
                if not math.isclose(value, expected, rel_tol=tolerance):
                    raise BenchmarkError(f"{workload.name}: step {step} of {name!r} has loss {value}, of {DDP!r} {expected}")

    def measure(self, workload: Workload, arguments: argparse.Namespace) -> JSON:
        """Return all measurements of one workload, after the check that all contenders did the same work."""
        sittings = []
        for number in range(arguments.sittings):
            print(f"{workload.name}: sitting {number + 1} of {arguments.sittings}", file=sys.stderr, flush=True)
            fused = arguments.optimizer == "fused"
            result = sitting(
                self.contenders(workload.name, arguments.seed, fused=fused, only=arguments.contenders),
                rounds=arguments.rounds,
                steps=arguments.steps,
                settle=arguments.settle,
                warm_up=arguments.warm_up,
                check_steps=arguments.check_steps,
                check_with={"dropout": False},
                timeout_s=arguments.timeout,
            )
            self.check_same_work(workload, result["losses"])
            sittings.append(result)
        parameters = sum(parameter.numel() for parameter in workload.build(arguments.seed).parameters())
        return {"words": workload.words, "rows": workload.rows, "parameters": parameters, "sittings": sittings}

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the settings that a command line gives."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.description)
        parser.add_argument("--name", default=None, help="name of the result; by default that of the optimizer")
        parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(self.workloads))
        parser.add_argument("--contenders", nargs="+", default=None, help=f"who takes part, {DDP!r} among them; by default all")
        kinds = ("default", "fused")
        parser.add_argument("--optimizer", choices=kinds, default="default", help="AdamW as torch sets it up, or fused")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--timeout", type=float, default=300.0, help="longest wait for a process, in seconds")
        parser.add_argument("--results", type=Path, default=self.results, help="folder of the results")
        return with_settings(parser, words, FULL, self.quick)

    def main(self, words: Sequence[str] | None = None) -> Path:
        """Run the benchmark and return the file of its result."""
        words = list(sys.argv[1:] if words is None else words)
        arguments = self.parse(words)
        everyone = self.contenders("", 0, fused=False, only=arguments.contenders)
        result: JSON = {
            "command": command(self.module, words, "--results"),
            **facts(),
            "optimizer": {"kind": "AdamW", "fused": arguments.optimizer == "fused", "lr": LR, "weight_decay": WEIGHT_DECAY},
            "dtype": "float32",
            "seed": arguments.seed,
            "workers": WORKERS,
            "threads": {each.name: {"processes": each.processes, "intra_op": each.threads} for each in everyone},
            "settings": {key: getattr(arguments, key) for key in FULL},
            "workloads": {},
        }
        path: Path = arguments.results / f"{arguments.name or arguments.optimizer}.json"
        for name in arguments.workloads:  # written after each, so that what fails later costs nothing that is done
            result["workloads"][name] = self.measure(WORKLOADS[name], arguments)
            write(path, result)
        print(f"wrote {path.name}; now run python -m benchmarks.tables", file=sys.stderr)
        return path
