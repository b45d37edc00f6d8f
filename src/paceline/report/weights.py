"""A module's weights as one safetensors file, published whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import UsageError

ALIASES = "paceline.aliases"


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a module's state so that `path` is at all times the old file or the new one, never half of one.

    Tied tensors are stored once; the metadata records the other names they go by, for `load_weights`.

    Raises:
        UsageError: the state holds something that is not a tensor.
        OSError: the file cannot be written; then nothing is left behind.
    """
    path = Path(path)
    tensors, aliases = _untie(model.state_dict())
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        try:
            save_file(tensors, temporary, metadata={"format": "pt", ALIASES: json.dumps(aliases)})
        except SafetensorError as error:
            raise OSError(None, str(error)) from error
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict that `save_weights` wrote, tied tensors under all their names, ready for `load_state_dict`.

    Raises:
        UsageError: there is no such file, or it is not whole.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
            aliases: dict[str, str] = json.loads((file.metadata() or {}).get(ALIASES, "{}"))
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read weights from {path} ({error}); pass a model.safetensors that a run has written") from error
    return state | {alias: state[name] for alias, name in aliases.items()}


def weights_bytes(model: nn.Module) -> int:
    """Return about how many bytes the file takes, tied tensors counted once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _untie(model.state_dict())[0].values())


def _untie(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct tensors by their first name, and for every further name the first one."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"state_dict()[{name!r}] is a {type(tensor).__name__}, and a safetensors file holds tensors only; "
                "make it a tensor, or train without a run folder"
            )
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and first.setdefault(key, name) != name:
            aliases[name] = first[key]
            continue
        # Safetensors refuses views of one storage, which parameters in one flat buffer are.
        tensor = tensor.detach().contiguous().clone() if storage in storages else tensor.detach().contiguous()
        storages.add(storage)
        tensors[name] = tensor if tensor.device.type == "cpu" else tensor.cpu()
    return tensors, aliases


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
