"""The source code of the Python standard library as training text: it is on every machine that can run this."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.errors import UsageError

# Installed packages are not the library, and tests and converters are mostly tables or deliberately odd code.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"})
HELD_OUT_SHARE = 0.1


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `length` bytes of a text, each with the same window one byte later: what a language model sees and predicts.

    Args:
        text: bytes, uint8[n].
        length: bytes of a window, at least 1.
        stride: bytes from the start of a window to that of the next, at least 1.
    """

    def __init__(self, text: Tensor, length: int, stride: int | None = None) -> None:
        self.text, self.length, self.stride = text, length, stride or length

    def __len__(self) -> int:
        return max(0, (len(self.text) - self.length - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.stride
        window = self.text[start : start + self.length + 1].long()
        return window[:-1], window[1:]


def read_source_text(root: Path | None = None) -> tuple[Tensor, Tensor]:
    """Return the library's source as (training text, held-out text), uint8 each; whole files fall on one side or the other.

    Args:
        root: the folder to read; None means this Python's standard library.

    Raises:
        UsageError: there is no source there (some systems ship the library compiled or zipped).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT.isdisjoint(name.parts):
            parts[is_held_out(name.as_posix())].append(path.read_bytes())
    if not parts[False] or not parts[True]:
        raise UsageError(
            f"found no source code of the Python standard library in {root}; "
            "job gpt needs a Python that has its library as .py files, or train a job of your own: path.py:function"
        )
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(parts[side])), dtype=torch.uint8) for side in (False, True))
    return train, held_out


def is_held_out(name: str) -> bool:
    """Return the side of a file by its name alone, so that it stays there when other files come or go."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < HELD_OUT_SHARE * 2**64
