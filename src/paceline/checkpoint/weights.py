"""Weights alone: out of whatever holds them, and into what other programs read."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.checkpoint.fit import weight_misfits
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.publish import flush_folder, telling
from paceline.checkpoint.reading import is_weights, read
from paceline.checkpoint.state import State
from paceline.checkpoint.store import Checkpoints
from paceline.checkpoint.tensor_files import ALIASES, INDEX, size_of, untie, write
from paceline.errors import CheckpointError, UsageError

CHECKPOINTS, WEIGHTS = "checkpoints", "model.safetensors"
STEPS_DONE = "paceline.steps_done"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WANTED = "pass a .safetensors file, a checkpoint, the folder of a run, or a Hugging Face folder with safetensors"


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return a plain state dict, tied tensors under all their names.

    Args:
        path: a `.safetensors` file, a checkpoint, the folder of a run (the newest checkpoint in it, or its `model.safetensors`
            where that is of a later step or there is no checkpoint), or a Hugging Face folder, in one file or in shards.

    Raises:
        UsageError: there are no weights there, or they lie in pickle files.
        CheckpointError: they are damaged or incomplete.
    """
    path = Path(path)
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _from_index(path)
        if path.suffix in PICKLED:
            raise UsageError(f"{path} is a pickle, which can run any code when it is read; {WANTED}, or load it yourself")
        return _from_file(path)
    if not path.is_dir():
        raise UsageError(f"there is nothing at {path}; {WANTED}")
    if (path / MANIFEST).exists():
        return read(path, is_weights).weights()
    for folder in (path / CHECKPOINTS, path):
        latest = Checkpoints(folder).latest()
        if latest is not None:
            return _newer(path / WEIGHTS, Checkpoints(folder), latest)
    if (path / INDEX).exists():
        return _from_index(path / INDEX)
    files = [path / WEIGHTS] if (path / WEIGHTS).exists() else sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return _from_file(files[0])
    pickles = [file.name for file in path.iterdir() if file.suffix in PICKLED] if not files else []
    found = f"pickle files only ({', '.join(pickles)})" if pickles else f"{len(files)} .safetensors files without {INDEX}"
    raise UsageError(f"{path} has {found}; {WANTED}")


def _newer(file: Path, checkpoints: Checkpoints, latest: Path) -> dict[str, Tensor]:
    """Return a run's weights: those of the file where it is of a later step than the newest checkpoint, else the checkpoint's."""
    with contextlib.suppress(OSError, SafetensorError, ValueError), safe_open(file, framework="pt") as opened:
        told = int((opened.metadata() or {}).get(STEPS_DONE, -1))
        if told > int(latest.name.split("-")[1].split(".")[0]):
            return _from_file(file)
    try:
        return read(latest, is_weights).weights()
    except CheckpointError as error:
        raise CheckpointError(latest, error.damage, checkpoints.whole_besides(latest), searched=True) from error


def _from_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            aliases: dict[str, str] = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
            return state | {alias: state[name] for alias, name in aliases.items()}
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(path, [f"it is no whole safetensors file ({error})"]) from error


def _from_index(index: Path) -> dict[str, Tensor]:
    """Return the weights that an index of shards names, after making sure that index and shards say the same."""
    folder = index.parent
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(folder, [f"{index.name} is damaged ({type(error).__name__}: {error})"]) from error
    problems = [problem for file in files if (problem := _shard_problem(folder, file)) is not None]
    if problems:
        raise CheckpointError(folder, problems)
    shards = {file: _from_file(folder / file) for file in files}
    for name, file in weight_map.items():
        if name not in shards[file]:
            problems.append(f"{file} lacks {name}, which {index.name} says is there")
    problems += [
        f"{file} holds {name}, which {index.name} does not name there"
        for file, tensors in shards.items()
        for name in tensors
        if weight_map.get(name, file) != file
    ]
    if problems:
        raise CheckpointError(folder, problems)
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def _shard_problem(folder: Path, file: str) -> str | None:
    """Return why a shard cannot be used; its name may lead below the folder, and in a Hugging Face cache to the blobs beside it."""
    outside = f"{INDEX} names the file {file!r}, which lies outside of its folder"
    if not file or "\\" in file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
        return outside
    root = folder.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    target = (folder / file).resolve()
    if not any(target.is_relative_to(place) for place in allowed):
        return outside
    return None if target.is_file() else f"{file} is missing"


def export_weights(
    source: State | Mapping[str, Any] | str | os.PathLike[str], target: str | os.PathLike[str], model: nn.Module | None = None
) -> Path:
    """Write weights for other programs and return where: one `.safetensors` file, or a folder that `from_pretrained` opens.

    Args:
        source: a state, a state dict, or anything that `load_weights` reads.
        target: the file, replaced in one moment where there is one; with a `model`, a folder that does not exist yet or is empty.
        model: a module with `save_pretrained`. The weights are loaded into it, and it writes the folder.

    Raises:
        UsageError: the weights are not the model's, or the target cannot be written.
        CheckpointError: the source is damaged.
    """
    target = Path(target)
    if isinstance(source, State):
        weights, metadata = source.weights, {STEPS_DONE: str(source.steps_done)}
    else:
        weights, metadata = dict(source) if isinstance(source, Mapping) else load_weights(source), {}
    if model is not None:
        return _export_pretrained(weights, target, model)
    foreign = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if foreign:
        raise UsageError(
            f"{foreign[0]} is not a tensor, and a .safetensors file holds tensors only; leave it out of the state dict"
        )
    if target.suffix != ".safetensors":
        raise UsageError(f"{target} does not end in .safetensors; pass for example {target.with_suffix('.safetensors')}")
    distinct, aliases = untie(weights)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with telling(target, lambda: sum(map(size_of, distinct.values()))):
        try:
            write(hidden, distinct, {"format": "pt", ALIASES: json.dumps(aliases)} | metadata)
            os.replace(hidden, target)
            flush_folder(target.parent)
        finally:
            hidden.unlink(missing_ok=True)
    return target


def _export_pretrained(weights: Mapping[str, Any], target: Path, model: nn.Module) -> Path:
    save = getattr(model, "save_pretrained", None)
    if save is None:
        raise UsageError(f"{type(model).__name__} has no save_pretrained; leave model= out to write a .safetensors file")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists already; pass a folder that does not exist or is empty")
    misfits = [misfit for misfit in weight_misfits(weights, model.state_dict()) if misfit.kind != "dtype"]
    if misfits:
        raise UsageError(f"the weights are not those of the {type(model).__name__}: {'; '.join(map(str, misfits[:5]))}")
    model.load_state_dict(weights)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with telling(target, lambda: sum(size_of(value) for value in weights.values() if isinstance(value, Tensor))):
        try:
            save(hidden)
            os.replace(hidden, target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return target
