"""Measure the wrappers in an ordinary loop over two CPU workers and write every single measurement to results/NAME.json.

From the root of the repository:

    python -m benchmarks.wrappers.run
    python -m benchmarks.wrappers.run --quick
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.data_parallel.contenders import LIMIT, ONE_PROCESS
from benchmarks.training import FULL, Benchmark
from benchmarks.wrappers.contenders import ONE_THREAD, contenders

BENCHMARK = Benchmark(
    module="benchmarks.wrappers.run",
    description=__doc__.splitlines()[0],
    contenders=contenders,
    workloads=("gpt", "mlp", "cnn"),
    quick=FULL | {"sittings": 1, "rounds": 5, "steps": 4, "warm_up": 2},
    results=Path(__file__).parent / "results",
    apart=(LIMIT,),
    whole=(ONE_PROCESS, ONE_THREAD),
)

if __name__ == "__main__":
    BENCHMARK.main()
