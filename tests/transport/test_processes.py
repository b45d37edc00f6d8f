"""The harness that runs functions in processes tells what became of each."""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.processes import ProcessDied, ProcessTimeout, RemoteTraceback, Workers


def end_somehow(rank: int, size: int, how: str) -> tuple[int, int, str | None]:
    if rank == 1:
        if how == "raise":
            error = ValueError("wrong")
            error.add_note("rank 1, step 2")
            raise error
        if how == "exit":
            sys.exit(4)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(60)
    return rank, size, os.environ.get("PACELINE_TEST")


def test_each_end_is_told(workers: Workers) -> None:
    assert workers.run(2, end_somehow, "return", environment={"PACELINE_TEST": "1"}) == [(0, 2, "1"), (1, 2, "1")]
    raised, ended, killed, again = (workers.run(2, end_somehow, how)[1] for how in ("raise", "exit", "kill", "return"))
    assert isinstance(raised, ValueError)
    assert raised.__notes__ == ["rank 1, step 2"]
    assert isinstance(raised.__cause__, RemoteTraceback)
    assert isinstance(ended, ProcessDied)
    assert "exit code 4" in str(ended)
    assert isinstance(killed, ProcessDied)
    assert killed.signal == signal.SIGKILL
    assert again == (1, 2, None)
    results = workers.run(2, end_somehow, "hang", timeout_s=1.0)
    assert results[0] == (0, 2, None)
    assert isinstance(results[1], ProcessTimeout)
