"""From what stands on a command line to a job: a built-in name, or a function in a Python file."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.job import Job
from paceline.jobs import digits, gpt
from paceline.random_streams import stream_seed, use_random_stream

BUILT_IN: dict[str, Callable[[], Job]] = {"gpt": gpt.job, "digits": digits.job}


def find_job(text: str) -> Job:
    """Return the job that `text` names: `gpt`, `digits` or `path.py:function`, a function without required arguments.

    The file is run as a script would be, with its folder first among the places that it imports from, and with the random
    generators seeded, so that a model built without a seed of its own is the same on every rank and in every run.

    Raises:
        UsageError: there is no such job, file or function, the file cannot be run, or the function returns no `Job`.
    """
    if text in BUILT_IN:
        return BUILT_IN[text]()
    path_text, colon, name = text.rpartition(":")
    if not colon or not path_text.endswith(".py"):
        if text.endswith(".py"):
            raise UsageError(f"job {text!r} names a file but no function in it; write {text}:function")
        close = difflib.get_close_matches(text, BUILT_IN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"there is no job {text!r}; a job is {', '.join(BUILT_IN)}, or path.py:function{hint}")
    path = Path(path_text)
    if not path.is_file():
        names = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = _did_you_mean(path.name, names) or "; write path.py:function of a file that exists"
        raise UsageError(f"there is no file {path_text}{hint}")
    with use_random_stream(stream_seed("job", name)):
        function = _function(_run_file(path), path, name)
        job = _made(function, text, path)
    if not isinstance(job, Job):
        raise UsageError(f"{text} returned {type(job).__name__}; it must return a paceline.Job")
    return job


def _made(function: Callable[[], Any], text: str, path: Path) -> Any:
    try:
        return function()
    except PacelineError:
        raise
    except Exception as error:
        raise UsageError(f"{text} raised {_what(error)}{_line_in(path, error)}; it must return a paceline.Job") from error


def _run_file(path: Path) -> ModuleType:
    path = path.resolve()
    # Not the bare stem, which could be that of a module the file itself imports (random.py).
    name = f"paceline_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file that can be run; pass a .py file")
    module = importlib.util.module_from_spec(spec)
    # As for a script: its siblings can be imported, and what it defines can be found again when it is unpickled.
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"cannot run {os.path.relpath(path)}: {_what(error)}{_line_in(path, error)}; correct the file") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    function = getattr(module, name, None)
    if function is None:
        known = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise UsageError(f"{path} has no function {name!r}; {known}{_did_you_mean(name, functions)}")
    if isinstance(function, Job):
        return lambda: function
    if not callable(function):
        raise UsageError(f"{path}:{name} is {type(function).__name__}; it must be a function that returns a paceline.Job")
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise UsageError(f"{path}:{name} needs {', '.join(needed)}; a job function takes no required arguments: give them defaults")
    return function  # type: ignore[no-any-return]


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _what(error: BaseException) -> str:
    """Return type and message of an error in one line."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _line_in(path: Path, error: BaseException) -> str:
    """Return ` (line 7)`, the last line of the file that was running."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return ""  # its message ends with the line already
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    return f" (line {lines[-1]})" if lines else ""
