"""Reading a checkpoint: everything is verified before anything is given out, and every tensor is read once."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.checksums import bytes_of, checksum, in_threads
from paceline.checkpoint.encoding import DTYPES, decode
from paceline.checkpoint.manifest import STATE, Manifest, read_manifest
from paceline.checkpoint.parts import WEIGHTS_STEM
from paceline.checkpoint.state import OptimizerState, State, with_versions
from paceline.checkpoint.tensor_files import INDEX, STORED, Stored, Written, dtype_name
from paceline.errors import CheckpointError

LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint: its manifest, its tensors by file, its texts."""

    manifest: Manifest
    tensors: dict[str, dict[str, Tensor]]
    texts: dict[str, bytes]

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under all their names."""
        stored = {name: tensor for file, part in self.tensors.items() if is_weights(file) for name, tensor in part.items()}
        return stored | {alias: stored[name] for alias, name in self.manifest.aliases.items()}


def is_weights(file: str) -> bool:
    """Return whether a tensor file of a checkpoint holds weights."""
    return file == f"{WEIGHTS_STEM}.safetensors" or file.startswith(f"{WEIGHTS_STEM}-")


def read(folder: Path, wanted: Callable[[str], bool] = lambda file: True) -> Contents:
    """Return what a checkpoint holds, of the tensor files those that are wanted, after all of that has been verified.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    manifest = read_manifest(folder)
    problems: list[str] = []
    texts: dict[str, bytes] = {}
    for name, (size, check) in manifest.texts.items():
        problem = file_problem(folder, name, size)
        if problem is None:
            texts[name] = (folder / name).read_bytes()
            problem = (
                None if checksum(texts[name]) == check else f"{name} is damaged: its checksum is another than when it was saved"
            )
        if problem is not None:
            problems.append(problem)
    if INDEX in texts and not problems:
        problems += _index_problems(texts[INDEX], manifest)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, file in manifest.files.items():
        if wanted(name):
            problem = file_problem(folder, name, file.size)
            if problem is None:
                tensors[name], found = _read_tensors(folder / name, file)
                problems += found
            else:
                problems.append(problem)
    problems += [problem for problem in in_threads(_damaged, _tasks(manifest, tensors)) if problem is not None]
    if problems:
        raise CheckpointError(folder, problems)
    return Contents(manifest, {name: _restored(part, manifest.files[name]) for name, part in tensors.items()}, texts)


def file_problem(folder: Path, name: str, size: int | None = None) -> str | None:
    """Return why a file that an index names cannot be used: outside of the folder, missing, of another size; None where it can."""
    if not name or name in (".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        return f"it names the file {name!r}, which lies outside of its folder"
    try:
        found = (folder / name).lstat()
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return f"{name} is a link, and a checkpoint holds its own files only"
    if not stat.S_ISREG(found.st_mode):
        return f"{name} is not a file"
    if size is not None and found.st_size != size:
        how = "truncated" if found.st_size < size else "longer"
        return f"{name} is {how}: it has {found.st_size:,} bytes, not the {size:,} that were saved"
    return None


def _index_problems(text: bytes, manifest: Manifest) -> list[str]:
    try:
        told = json.loads(text)["weight_map"]
        outside = [
            f"{INDEX} names the file {file!r} for {name}, which is not its"
            for name, file in told.items()
            if file not in manifest.files
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{INDEX} is damaged ({type(error).__name__}: {error})"]
    saved = {name: file for file, of in manifest.files.items() if is_weights(file) for name in of.tensors}
    return outside or ([] if told == saved else [f"{INDEX} names other tensors or files than were saved"])


def header_bytes(path: Path) -> bytes:
    """Return the header of a safetensors file with its length before it; less where the file is too short."""
    with open(path, "rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))


def _read_tensors(path: Path, file: Written) -> tuple[dict[str, Tensor], list[str]]:
    """Return a file's tensors as they lie there, mapped into memory, and what its header shows to be wrong."""
    try:
        if checksum(header_bytes(path)) != file.header:
            return {}, [f"{path.name} is damaged: its header's checksum is another than when it was saved"]
        with safe_open(path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
    except (OSError, SafetensorError, ValueError) as error:
        return {}, [f"{path.name} is damaged ({error})"]
    problems = [f"{path.name} lacks {name}" for name in file.tensors.keys() - tensors.keys()]
    problems += [f"{path.name} holds {name}, which was not saved" for name in tensors.keys() - file.tensors.keys()]
    for name in file.tensors.keys() & tensors.keys():
        tensor, told = tensors[name], file.tensors[name]
        dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
        plain = DTYPES.get(told.dtype) in STORED
        if plain and (dtype, shape) != (told.dtype, told.shape):
            problems.append(f"{path.name}: {name} is {dtype} {shape}, not the {told.dtype} {told.shape} that was saved")
    return ({} if problems else tensors), sorted(problems)


def _tasks(manifest: Manifest, tensors: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, str, Tensor, Stored]]:
    tasks = [
        (file, name, tensor, manifest.files[file].tensors[name]) for file, part in tensors.items() for name, tensor in part.items()
    ]
    return sorted(tasks, key=lambda task: -task[2].numel() * task[2].element_size())


def _damaged(task: tuple[str, str, Tensor, Stored]) -> str | None:
    file, name, tensor, told = task
    found = checksum(bytes_of(tensor))
    return None if found == told.checksum else f"{file}: {name} is damaged, its checksum is {found}, not {told.checksum}"


def _restored(tensors: Mapping[str, Tensor], file: Written) -> dict[str, Tensor]:
    """Return the tensors in the dtypes that they were saved in, in the order in which they were."""
    restored = {}
    for name, told in file.tensors.items():
        dtype = DTYPES[told.dtype]
        restored[name] = tensors[name] if dtype in STORED else tensors[name].view(dtype).reshape(told.shape)
    return restored


def read_state(folder: Path) -> State:
    """Return the state that a checkpoint holds.

    Raises:
        CheckpointError: with everything that is wrong.
    """
    contents = read(folder)
    weights = contents.weights()
    others = {name: tensor for file, part in contents.tensors.items() if not is_weights(file) for name, tensor in part.items()}
    try:
        words: dict[str, Any] = decode(json.loads(contents.texts[STATE]), others)
        extra = words["extra_state"]
        return State(
            weights=with_versions(
                {name: extra[name] if name in extra else weights[name] for name in words["weights"]}, words["versions"]
            ),
            optimizers={name: OptimizerState(**of) for name, of in words["optimizers"].items()},
            **{part: words[part] for part in ("progress", "schedulers", "random", "objects", "facts")},
        )
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        # The checksums hold, so it was saved like this: by another program, or another version.
        raise CheckpointError(
            folder, [f"{STATE} does not say what this version reads ({type(error).__name__}: {error})"]
        ) from error
