"""The public names: those that are promised, and no others."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import paceline

INIT = Path(paceline.__file__)


def test_all_names_are_there_and_sorted() -> None:
    """`__all__` lists, in order, exactly what __init__.py imports."""
    imported = [
        alias.asname or alias.name
        for node in ast.parse(INIT.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(imported) == paceline.__all__
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def test_every_public_name_has_a_docstring() -> None:
    """What is public says what it is, and so does each of its public methods."""
    missing = []
    for name in paceline.__all__:
        value = getattr(paceline, name)
        if not (value.__doc__ or "").strip():
            missing.append(name)
        if isinstance(value, type):
            own = {key: member for key, member in vars(value).items() if not key.startswith("_")}
            members = {key: member for key, member in own.items() if callable(member) or isinstance(member, property | classmethod)}
            missing += [f"{name}.{key}" for key, member in members.items() if not member.__doc__]
    assert not missing


def test_package_is_typed() -> None:
    """Type checkers read the annotations of the installed package."""
    assert (INIT.parent / "py.typed").is_file()


def test_import_leaves_the_process_as_it_was() -> None:
    """Importing Paceline seeds nothing, sets no thread count, starts no thread and makes no process group."""
    code = (
        "import random, threading, torch, numpy as np, torch.distributed as dist\n"
        "def state():\n"
        "    draws = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()\n"
        "    modes = torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()\n"
        "    return draws, modes, threading.active_count()\n"
        "before = state()\n"
        "import paceline\n"
        "assert state() == before\n"
        "assert not dist.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
