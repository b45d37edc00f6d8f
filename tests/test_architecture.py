"""The shape of the source: imports point down only, and some things are not done at all. Read from the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"

# From top to bottom. A part may import parts of lower layers and itself; parts of one layer do not know each other.
# Parts that do not exist yet have their place already.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "__init__ __main__",
        "cli",
        "jobs",
        "verify",
        "parallel",
        "trainer",
        "resume feed",
        "assembly evaluation stopping",
        "planner report",
        "checkpoint",
        "worker",
        "split",
        "precision",
        "data",
        "transport",
        "schedule",
        "job plan layout",
        "errors trace random_streams",
    )
)
# Plain values, which tools may read without waiting for torch.
WITHOUT_TORCH = frozenset({"schedule", "plan", "layout", "trace", "errors"})
# The built-in models are what users write: they show that a model knows nothing of the engine.
OPEN_TO_JOBS = frozenset({"paceline.job", "paceline.errors"})
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"})
# (file, module) -> why this import may stand inside a function.
LATE_IMPORTS = {
    ("report/loggers.py", "torch.utils.tensorboard"): "tensorboard is an optional dependency",
    (
        "cli/launch.py",
        "torch.distributed.elastic.multiprocessing",
    ): "takes a second, which commands that start nothing should not spend",
    ("cli/launch.py", "torch.distributed.elastic.multiprocessing.errors"): "as above",
    ("cli/launch.py", "torch.distributed.launcher.api"): "as above",
}


def violations(source: str, file: str) -> Iterator[str]:
    """Yield what is wrong with a file of src/paceline, each with what to do; `file` is its path there."""
    tree = ast.parse(source)
    yield from _vague_name(file)
    yield from _directions(tree, file)
    yield from _late_imports(tree, file)
    yield from _globals(tree, file)
    yield from _patches(tree, file)


def _part(module: str) -> str:
    """Return the part of the package that a module `paceline.part.file` belongs to; of the package itself `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def _part_of_file(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def _level(part: str) -> int | None:
    return next((level for level, layer in enumerate(LAYERS) if part in layer), None)


def _imports(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import, relative ones as absolute; `from paceline import part` is an import of the part."""
    package = ["paceline", *Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "paceline":
                yield from (
                    (node.lineno, f"paceline.{alias.name}" if _level(alias.name) is not None else module) for alias in node.names
                )
            else:
                yield node.lineno, module


def _vague_name(file: str) -> Iterator[str]:
    for word in Path(file).with_suffix("").parts:
        if word in VAGUE_NAMES:
            yield f"{file}: {word!r} names no idea; name the module after what it knows"


def _directions(tree: ast.AST, file: str) -> Iterator[str]:
    part = _part_of_file(file)
    level = _level(part)
    if level is None:
        yield f"{file}: {part!r} has no layer; give it one in LAYERS, as low as its imports allow"
        return
    for line, module in _imports(tree, file):
        top = module.split(".")[0]
        if top == "torch" and part in WITHOUT_TORCH:
            yield f"{file}:{line}: {part} imports {module}, a value without torch; move what needs torch up"
        if top != "paceline":
            continue
        other = _part(module)
        if part == "jobs" and other != "jobs" and module not in OPEN_TO_JOBS and file != "jobs/find.py":
            yield (
                f"{file}:{line}: a built-in job imports {module}; it may know {', '.join(sorted(OPEN_TO_JOBS))} only, "
                "so write it as a user would"
            )
        elif other == "__init__":
            if part not in LAYERS[0] | LAYERS[1]:
                yield f"{file}:{line}: imports from paceline itself, the public door; import from the module that defines the name"
        elif other != part and (_level(other) is None or _level(other) <= level):  # type: ignore[operator]
            yield (
                f"{file}:{line}: {part} imports {module}, which lies {'beside' if _level(other) == level else 'above'} it; "
                f"pass what is needed as an argument, or move it down to a part that both may import"
            )


def _late_imports(tree: ast.AST, file: str) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for line, module in _imports(function, file):
                if (file, module) not in LATE_IMPORTS:
                    yield (
                        f"{file}:{line}: imports {module} inside a function; move it to the top of the file, "
                        "or, for an optional dependency, list it in LATE_IMPORTS with the reason"
                    )


def _globals(tree: ast.AST, file: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{file}:{node.lineno}: global {', '.join(node.names)}; keep the state in an object that is passed on"


def _patches(tree: ast.AST, file: str) -> Iterator[str]:
    """Find assignments to attributes of what was imported from torch, as statements and through setattr."""
    ours = _names_from_torch(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr") and _root(node.args[0]) in ours:
            yield _patch(file, node.lineno, ast.unparse(node.args[0]))
        for target in targets:
            for written in ast.walk(target):
                if isinstance(written, ast.Attribute) and isinstance(written.ctx, ast.Store | ast.Del) and _root(written) in ours:
                    yield _patch(file, node.lineno, ast.unparse(written))


def _patch(file: str, line: int, what: str) -> str:
    return f"{file}:{line}: changes {what}, which belongs to torch and to the whole process; use a mode, a hook or a subclass"


def _names_from_torch(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _root(node: ast.expr) -> str | None:
    """Return the name at the left end of `a.b.c`; None where the left end is no name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_source_keeps_the_architecture() -> None:
    """No file of the package breaks a rule of its shape."""
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no source in {SOURCE}"
    found = [wrong for path in files for wrong in violations(path.read_text(), path.relative_to(SOURCE).as_posix())]
    assert not found, "\n" + "\n".join(found)


def test_list_of_late_imports_has_no_leftovers() -> None:
    """Every exception that is listed is needed."""
    present = {(file, module) for file, _ in LATE_IMPORTS if (SOURCE / file).is_file() for _, module in _all_imports(file)}
    assert set(LATE_IMPORTS) <= present, f"take out of LATE_IMPORTS: {set(LATE_IMPORTS) - present}"


def _all_imports(file: str) -> list[tuple[int, str]]:
    return list(_imports(ast.parse((SOURCE / file).read_text()), file))


@pytest.mark.parametrize(
    ("file", "source", "says"),
    [
        ("worker/a.py", "from paceline.trainer import Trainer", "worker imports paceline.trainer, which lies above it"),
        ("worker/a.py", "from ..trainer import Trainer", "lies above it"),
        ("worker/a.py", "from paceline import trainer", "lies above it"),
        ("worker/a.py", "import paceline.cli.app", "lies above it"),
        ("data/a.py", "if True:\n    from paceline.worker.worker import Worker", "data imports paceline.worker.worker"),
        ("plan.py", "from paceline.layout import Layout", "lies beside it"),
        ("evaluation.py", "from paceline.assembly import assemble", "lies beside it"),
        ("report/a.py", "from paceline.planner import search", "lies beside it"),
        ("transport/a.py", "from paceline import Job", "the public door"),
        ("jobs/a.py", "from paceline.worker.worker import Worker", "a built-in job imports paceline.worker.worker"),
        ("jobs/a.py", "from paceline.trainer import Trainer", "a built-in job"),
        ("layout.py", "import torch", "a value without torch"),
        ("schedule/a.py", "from torch import Tensor", "a value without torch"),
        ("sub/a.py", "", "'sub' has no layer"),
        ("data/utils.py", "", "'utils' names no idea"),
        ("manager/a.py", "", "'manager' names no idea"),
        ("job.py", "def f():\n    import json", "inside a function"),
        ("job.py", "async def f():\n    from numpy import array", "inside a function"),
        ("job.py", "x = 0\ndef f():\n    global x\n    x = 1", "global x"),
        ("job.py", "import torch\ntorch.nn.Linear.forward = None", "changes torch.nn.Linear.forward"),
        ("job.py", "import torch.nn.functional as F\nF.dropout = None", "changes F.dropout"),
        ("job.py", "from torch import nn\nnn.Module.x, y = 1, 2", "changes nn.Module.x"),
        ("job.py", "from torch import nn\nsetattr(nn.Linear, 'forward', None)", "changes nn.Linear"),
        ("job.py", "import torch\ndel torch.add", "changes torch.add"),
    ],
)
def test_bad_source_is_found(file: str, source: str, says: str) -> None:
    """Each rule finds a source that breaks it, and says where."""
    found = list(violations(source, file))
    assert any(says in wrong for wrong in found), found
    assert all(wrong.startswith(file) for wrong in found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trainer.py", "import torch\nfrom paceline.assembly import assemble\nfrom paceline.job import Job"),
        (
            "worker/a.py",
            "from paceline.data.tree import find\nfrom paceline.worker.flat import FlatLayout\nfrom .flat import FlatLayout",
        ),
        ("job.py", "from paceline.errors import UsageError"),
        ("jobs/a.py", "from paceline.job import Job\nfrom paceline.jobs.source_text import Windows"),
        ("report/loggers.py", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        ("__init__.py", "from paceline.trainer import Trainer"),
        ("cli/a.py", "import paceline"),
        ("worker/a.py", "import torch\nmodule = torch.nn.Linear(1, 1)\nmodule.training = False"),
    ],
)
def test_good_source_passes(file: str, source: str) -> None:
    """What is allowed is not reported."""
    assert list(violations(source, file)) == []
