"""Measure data parallelism over two CPU workers and write every single measurement to results/NAME.json.

From the root of the repository:

    python -m benchmarks.data_parallel.run
    python -m benchmarks.data_parallel.run --quick
    python -m benchmarks.data_parallel.run --optimizer fused --name fused --workloads mlp gpt
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.data_parallel.contenders import LIMIT, ONE_PROCESS, contenders
from benchmarks.training import FULL, Benchmark

BENCHMARK = Benchmark(
    module="benchmarks.data_parallel.run",
    description=__doc__.splitlines()[0],
    contenders=contenders,
    workloads=("mlp", "gpt", "gpt_10m", "cnn"),
    quick=FULL | {"sittings": 1, "rounds": 4, "steps": 3, "warm_up": 2},
    results=Path(__file__).parent / "results",
    apart=(LIMIT,),
    whole=(ONE_PROCESS,),
)

if __name__ == "__main__":
    BENCHMARK.main()
