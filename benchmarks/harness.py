"""Contenders that take turns in standing processes, and what must be known about a measurement to believe it.

A contender is one or more processes that stay alive for a whole sitting. In every round each contender gets one turn of a few steps
while all others wait without using a core, so that whatever disturbs the machine for a while disturbs all of them. The order is
rotated from round to round. A sitting starts all processes anew.

A process is started as `python -m benchmarks.harness DESCRIPTOR MODULE:FUNCTION ARGUMENTS`; the function returns a `Stepper`.
What the two ends say to each other is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JSON = dict[str, Any]
SETTINGS = {
    "sittings": "how often all processes are started anew",
    "rounds": "turns of each contender in a sitting",
    "steps": "timed steps in a turn",
    "settle": "steps at the start of each turn that are not timed",
    "warm_up": "steps after the start that are not timed",
    "check_steps": "steps whose losses are compared",
}


class BenchmarkError(Exception):
    """A measurement that must not be used: a process failed, or the contenders did not do the same work."""


class Stepper:
    """What a contender's process does over and over."""

    def step(self) -> Any:
        """Take one step, which is timed, and return its loss or what else tells of its work, as something that `float` reads."""
        raise NotImplementedError

    def rest(self) -> None:
        """Do what belongs between two steps and is not timed."""

    def notes(self) -> JSON:
        """Return what else the result shall say of this process, after the last step."""
        return {}

    def close(self) -> None:
        """Give back what the steps needed."""


@dataclass(frozen=True)
class Contender:
    """A way to do the work: `processes` that each run `function(rank, **arguments)` from `module:function`.

    With `joined`, the processes are told of each other through the variables that torchrun sets.
    """

    name: str
    function: str
    processes: int
    threads: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    joined: bool = False


class Standing:
    """A contender's processes, from their start to their end."""

    def __init__(self, contender: Contender, *, timeout_s: float) -> None:
        self.contender, self._timeout_s = contender, timeout_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        port = _free_port()
        for rank in range(contender.processes):
            here, there = socket.socketpair()
            with there:
                command = [
                    sys.executable, "-m", "benchmarks.harness", str(there.fileno()), contender.function,
                    json.dumps({"rank": rank, **contender.arguments}),
                ]  # fmt: skip
                environment = _environment(contender, rank, port)
                self._processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[there.fileno()]))
            self._connections.append(Connection(here.detach()))

    def ask(self, **question: Any) -> list[JSON]:
        """Send the same question to all processes at once and return their answers, in rank order."""
        for connection in self._connections:
            try:
                connection.send_bytes(json.dumps(question).encode())
            except OSError as error:
                raise BenchmarkError(f"a process of {self.contender.name!r} has ended; its error is above") from error
        return self.answers()

    def answers(self) -> list[JSON]:
        """Return what all processes say next, in rank order."""
        answers: list[JSON] = []
        end = time.monotonic() + self._timeout_s
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, end - time.monotonic())):
                raise BenchmarkError(f"{self.contender.name!r}: rank {rank} said nothing for {self._timeout_s:g} s")
            try:
                answers.append(json.loads(connection.recv_bytes()))
            except (EOFError, OSError) as error:
                raise BenchmarkError(f"{self.contender.name!r}: rank {rank} ended without an answer; its error is above") from error
        return answers

    def losses(self, steps: int, **changed: Any) -> list[float]:
        """Build anew with some other arguments and return the losses of the first steps, each the mean over the processes."""
        answers = self.ask(do="losses", steps=steps, arguments=changed, environment={"MASTER_PORT": str(_free_port())})
        return [sum(values) / len(values) for values in zip(*(answer["losses"] for answer in answers), strict=True)]

    def end(self, *, at_once: bool = False) -> None:
        """End the processes, which close what they have unless it must be at once."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(0.0 if at_once else 30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(contenders: Sequence[Contender], *, timeout_s: float) -> list[Standing]:
    """Start all contenders' processes and wait until each has built what it needs.

    Raises:
        BenchmarkError: a process failed; those that were started are ended.
    """
    standing: list[Standing] = []
    try:
        standing += [Standing(contender, timeout_s=timeout_s) for contender in contenders]
        for each in standing:
            each.answers()
    except BaseException as error:
        end(standing, error)
        raise
    return standing


def end(standing: Sequence[Standing], error: BaseException | None = None) -> None:
    """End the processes; those of a failed sitting at once."""
    for each in standing:
        each.end(at_once=error is not None)


def sitting(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    settle: int,
    warm_up: int,
    check_steps: int,
    check_with: Mapping[str, Any],
    timeout_s: float,
) -> JSON:
    """Measure all contenders in turns and return every step of every process, the memory and notes of each process, and losses.

    Args:
        contenders: who takes part.
        rounds: how many turns each gets.
        steps: timed steps in a turn.
        settle: steps at the start of a turn that are not timed: the caches are still another contender's.
        warm_up: steps after the start that are not timed.
        check_steps: steps whose losses are returned, from a fresh start after all else.
        check_with: what changes in the contenders' arguments for these.
        timeout_s: longest wait for an answer.
    """
    standing = start(contenders, timeout_s=timeout_s)
    try:
        for each in standing:
            each.ask(do="turn", settle=warm_up, steps=0)
        turns: list[JSON] = []
        for number in range(rounds):
            first = number % len(standing)
            for each in [*standing[first:], *standing[:first]]:
                load = round(os.getloadavg()[0], 2)
                answers = each.ask(do="turn", settle=settle, steps=steps)
                turn: JSON = {"round": number, "contender": each.contender.name, "load": load}
                turns.append(turn | {key: [answer[key] for answer in answers] for key in answers[0]})
        memory = {each.contender.name: each.ask(do="memory") for each in standing}
        losses = {each.contender.name: each.losses(check_steps, **check_with) for each in standing}
    except BaseException as error:
        end(standing, error)
        raise
    end(standing)
    return {"turns": turns, "memory": memory, "losses": losses}


def facts() -> JSON:
    """Return what a reader must know of software and machine to judge a result; no names of places or people."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy", "paceline")}},
        "hardware": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "load": list(os.getloadavg()),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """Return the commit of the working tree, with `+changes` where src or benchmarks differ from it; None where there is none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    head = git("rev-parse", "--verify", "--quiet", "HEAD")
    if not head:
        return None
    changed = git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/*/results", ":!benchmarks/README.md")
    return f"{head}+changes" if changed else head


def write(path: Path, result: JSON) -> None:
    """Write a result, one measurement a line, so that two results can be compared by eye."""
    text = json.dumps(result, indent=1)
    # Lists of numbers on one line each.
    text = re.sub(r"\[\s+([-\d.eE,\s]+?)\s+\]", lambda match: f"[{', '.join(match[1].replace(',', ' ').split())}]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def command(module: str, words: Sequence[str], *places: str) -> str:
    """Return the command line without the options that name `places`, which are a matter of the machine.

    >>> command("benchmarks.x.run", ["--quick", "--results", "/here", "--folder=/there"], "--results", "--folder")
    'python -m benchmarks.x.run --quick'
    """
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in places:
            next(rest, None)
        elif not word.startswith(tuple(f"{place}=" for place in places)):
            kept.append(word)
    return shlex.join(["python", "-m", module, *kept])


def with_settings(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, full: Mapping[str, int], quick: Mapping[str, int]
) -> argparse.Namespace:
    """Return what a command line says, with the settings of `full`, or of `quick` where it asks for them, that it does not give."""
    for name, number in full.items():
        flag = "--" + name.replace("_", "-")
        described = f"{SETTINGS[name]}; by default {number}" + (f", with --quick {quick[name]}" if quick[name] != number else "")
        parser.add_argument(flag, type=int, default=None, help=described)
    parser.add_argument("--quick", action="store_true", help="fewer turns and steps: a result in minutes, with wider quartiles")
    arguments = parser.parse_args(words)
    for name, number in (quick if arguments.quick else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, number)
    return arguments


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(contender: Contender, rank: int, port: int) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(contender.threads)}
    if contender.joined:
        size = str(contender.processes)
        environment |= {
            "RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    return environment


def memory_of_process() -> JSON:
    """Return this process's resident memory in bytes: the highest so far, and now."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # A maximum of the system's that may include the process that started this one.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"peak_bytes": peak, "now_bytes": peak}

    def kilobytes(name: str) -> int:
        found = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
        assert found is not None, f"/proc/self/status has no {name}"
        return int(found[1])

    return {"peak_bytes": kilobytes("VmHWM") * 1024, "now_bytes": kilobytes("VmRSS") * 1024}


class _Server:
    """This end of a contender's process."""

    def __init__(self, function: str, arguments: JSON) -> None:
        module, _, name = function.partition(":")
        self._make: Callable[..., Stepper] = getattr(importlib.import_module(module), name)
        self._arguments, self._idle = arguments, memory_of_process()["now_bytes"]
        self._stepper = self._make(**arguments)

    def serve(self, connection: Connection) -> None:
        """Say that the stepper is built, then do what the other end asks for, until it closes."""
        connection.send_bytes(b"{}")
        with contextlib.suppress(EOFError, OSError):
            while True:
                question = json.loads(connection.recv_bytes())
                connection.send_bytes(json.dumps(getattr(self, question.pop("do"))(**question)).encode())
        self._stepper.close()

    def turn(self, settle: int, steps: int) -> JSON:
        for _ in range(settle):
            self._stepper.step()
            self._stepper.rest()
        seconds, processor = [], 0.0
        for _ in range(steps):
            processor_before, before = time.process_time(), time.perf_counter()
            self._stepper.step()
            seconds.append(round(time.perf_counter() - before, 6))
            processor += time.process_time() - processor_before
            self._stepper.rest()
        return {"seconds": seconds, "cpu_seconds": round(processor, 6)}

    def memory(self) -> JSON:
        return {"idle_bytes": self._idle, **memory_of_process(), **self._stepper.notes()}

    def losses(self, steps: int, arguments: JSON, environment: dict[str, str]) -> JSON:
        self._stepper.close()
        os.environ.update({name: value for name, value in environment.items() if name in os.environ})
        self._stepper = self._make(**{**self._arguments, **arguments})
        return {"losses": [float(self._stepper.step()) for _ in range(steps)]}


if __name__ == "__main__":
    _Server(sys.argv[2], json.loads(sys.argv[3])).serve(Connection(int(sys.argv[1])))
