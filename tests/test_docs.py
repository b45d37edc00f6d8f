"""What the documents say is true: their Python runs, their commands exist, and so do the examples in the docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import itertools
import os
import pkgutil
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.run import get_args_parser
from typer.main import get_command

import paceline
from paceline.cli.app import app
from paceline.cli.resume import spell_out
from paceline.jobs.find import BUILT_IN
from paceline.plan import Plan

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Shells: `console` shows a session, of which lines that begin with $ are commands; `bash` is a script, such as one for Slurm.
LANGUAGES = frozenset({"python", "console", "bash", "text", "toml", "json", ""})


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `line` is that of its first line of content; `is_output` says that it follows a block directly."""

    language: str
    info: str
    text: str
    line: int
    is_output: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(m[1], m[2].strip(), m[3], text.count("\n", 0, m.start(3)) + 1, text[: m.start()].endswith("```\n\n"))
        for m in FENCE.finditer(text)
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands_of(block: Block) -> list[tuple[int, str]]:
    """Return line and text of each command of a shell block, continued lines joined."""
    found, lines = [], block.text.splitlines()
    for offset, line in enumerate(lines):
        is_command = line.startswith("$ ") if block.language == "console" else not line.startswith("#") and bool(line.strip())
        if is_command and not (offset and lines[offset - 1].endswith("\\")):
            command = line.removeprefix("$ ")
            while command.endswith("\\"):
                offset += 1
                command = command[:-1] + lines[offset]
            found.append((block.line + offset, command))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_of_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block runs, and prints what the text block directly below it shows.

    The blocks of a page share their names, as a reader reads them, from top to bottom.
    """
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    threads = torch.get_num_threads()
    try:
        blocks = blocks_of(page)
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            where = f"{name_of(page)}:{block.line}"
            assert block.language in LANGUAGES, f"{where}: {block.language!r} is not one of {sorted(LANGUAGES)}"
            if block.language == "python":
                assert not block.info, f"{where}: every Python block runs; make a block that cannot run one of text"
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    # Empty lines before it give tracebacks the line numbers of the page.
                    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
                if following is not None and following.language == "text" and following.is_output:
                    told, flags = following.text, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                    same = doctest.OutputChecker().check_output(told, printed.getvalue(), flags)
                    assert same, f"{where} prints\n{printed.getvalue()}\nwhere the page says\n{told}"
    finally:
        for value in names.values():
            if isinstance(value, paceline.Trainer):
                value.close()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_page_exist(page: Path) -> None:
    """Every command in a shell block is one that would be understood: the program, its options, its job and its plan."""
    for block in blocks_of(page):
        if block.language in ("console", "bash"):
            for line, command in commands_of(block):
                wrong = problem_with(command)
                assert wrong is None, f"{name_of(page)}:{line}: {command}: {wrong}"


def problem_with(command: str) -> str | None:
    """Return why a command line would not be understood, as far as that can be told without running it; None where it would."""
    try:
        _check_command(shlex.split(command, comments=True))
    except (AssertionError, paceline.PacelineError) as error:
        return str(error)
    except SystemExit:  # argparse has said why
        return "its options do not parse"
    except Exception as error:
        # Depending on its version typer brings click along or requires it; its usage errors have this method in both.
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None


def _check_command(words: list[str]) -> None:
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, arguments = words[0], words[1:]
    if program == "paceline":
        _check_paceline(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = [word for word in arguments if "=" not in word]
        assert set(wanted) <= set(targets), f"make knows {targets}"
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        _check_script(parsed.training_script, parsed.training_script_args)
    elif program in ("srun", "mpirun"):
        # Their own options are not ours to know; what they start is.
        start = next(index for index, word in enumerate(arguments) if word in ("paceline", "python"))
        _check_command(arguments[start:])
    elif program in ("python", ".venv/bin/python"):
        if arguments[0] != "-m":
            _check_script(arguments[0], arguments[1:])
    elif program == "git":
        assert arguments[0] in ("clone", "add", "commit")
    else:
        assert program in ("cd", "export", "pip", "tensorboard", "sbatch", "source"), "not a command that these documents use"


def _check_script(script: str, arguments: list[str]) -> None:
    if script == "paceline" or script.endswith("/paceline"):
        _check_paceline(arguments)
    else:
        assert (ROOT / script).is_file() or script == "train.py", "no such file in the repository, and not the reader's train.py"


def _check_paceline(arguments: list[str]) -> None:
    group = get_command(app)
    if arguments in (["--help"], ["--version"]):
        return
    name, command, rest = group.resolve_command(group.context_class(group, info_name="paceline"), spell_out(arguments))
    if "--help" in rest:
        return
    assert command is not None
    given = command.make_context(name, list(rest)).params
    if given.get("plan"):
        Plan.parse(given["plan"])
    job = given.get("job")
    assert job is None or job in BUILT_IN or re.fullmatch(r"\w+\.py:\w+", job), (
        f"job {job!r} is neither built in nor path.py:function"
    )


def test_links_of_pages_lead_somewhere() -> None:
    """Relative links between the pages, and to files of the repository, have a target."""
    broken = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{name_of(page)}: {target}")
    assert not broken, broken


def test_every_page_of_docs_is_reachable() -> None:
    """A reader who starts at the README gets to every page by links."""
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        todo += [page.parent / target for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())]
    assert not [name_of(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page.resolve() not in seen]


MODULES = sorted(module.name for module in pkgutil.walk_packages(paceline.__path__, "paceline."))


@pytest.mark.parametrize("name", ["paceline", *(name for name in MODULES if not name.endswith("__main__"))])
def test_examples_in_docstrings_run(name: str) -> None:
    """The examples in a module's docstrings give what stands below them."""
    threads = torch.get_num_threads()
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch, "nn": nn, "np": np, "os": os})
    torch.set_num_threads(threads)
    assert result.failed == 0


@pytest.mark.parametrize(
    "command",
    [
        "paceline fly gpt",
        "paceline train gpt --wings 2",
        "paceline train gpt --plan replica=2",
        "paceline train chess",
        "make coffee",
        "torchrun examples/nothing.py",
        "fly me",
    ],
)
def test_wrong_command_is_found(command: str) -> None:
    """The check of commands can fail."""
    assert problem_with(command) is not None
