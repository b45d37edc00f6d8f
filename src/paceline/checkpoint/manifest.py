"""`checkpoint.json`: every file of a checkpoint and every tensor in it, with what to check them by, and a checksum of itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.checksums import checksum
from paceline.checkpoint.tensor_files import Stored, Written
from paceline.errors import CheckpointError

MANIFEST, STATE = "checkpoint.json", "state.json"
FORMAT = 1
NO_CHECKSUM = "crc32:00000000"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        steps_done: the step after which it was saved.
        saved_ns: when, in nanoseconds since 1970; of two checkpoints in one folder the later saved has the higher number.
        best: whether it was the best so far, by whatever the run went by.
        texts: the files of text: size in bytes and checksum.
        files: the files of tensors.
        aliases: further names of weights, and the name that each is stored under.
    """

    steps_done: int
    saved_ns: int
    best: bool
    texts: dict[str, tuple[int, str]]
    files: dict[str, Written]
    aliases: dict[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file but the manifest itself."""
        return {name: size for name, (size, _) in self.texts.items()} | {name: file.size for name, file in self.files.items()}

    def to_json(self) -> str:
        """Return the text of the file."""
        words = {"format": FORMAT, "checksum": NO_CHECKSUM, **asdict(self)}
        text = json.dumps(words, indent=1)
        return text.replace(NO_CHECKSUM, checksum(text.encode()), 1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, which is whole where this returns.

    Raises:
        CheckpointError: there is none, it is damaged, or of a format that this version does not know.
    """
    path = folder / MANIFEST
    if path.is_symlink():
        raise CheckpointError(folder, [f"{MANIFEST} is a link, and a checkpoint holds its own files only"])
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointError(folder, [f"{MANIFEST} is missing, so this is no checkpoint, or only part of one"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(folder, [f"{MANIFEST} cannot be read ({error})"]) from error
    try:
        words = json.loads(text)
        found = words.pop("format")
        if isinstance(found, int) and found > FORMAT:
            raise CheckpointError(
                folder, [f"its format is {found}, and this version of Paceline reads up to {FORMAT}; install a newer one"]
            )
        told = words.pop("checksum")
        manifest = Manifest(
            steps_done=int(words["steps_done"]),
            saved_ns=int(words["saved_ns"]),
            best=bool(words["best"]),
            texts={name: (int(size), str(check)) for name, (size, check) in words["texts"].items()},
            files={name: _written(file) for name, file in words["files"].items()},
            aliases=words["aliases"],
        )
        # Written again it must be the same text: that covers every byte, and what is not read as well.
        whole = manifest.to_json() == text and found == FORMAT and isinstance(told, str)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(folder, [f"{MANIFEST} is damaged ({type(error).__name__}: {error})"]) from error
    if not whole:
        raise CheckpointError(folder, [f"{MANIFEST} is damaged: it does not have the checksum that it names"])
    return manifest


def _written(words: dict[str, Any]) -> Written:
    stored = {
        name: Stored(str(of["dtype"]), tuple(map(int, of["shape"])), str(of["checksum"])) for name, of in words["tensors"].items()
    }
    return Written(int(words["size"]), str(words["header"]), stored)
