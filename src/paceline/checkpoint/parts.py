"""A state taken apart into the files of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.encoding import Encoder
from paceline.checkpoint.manifest import STATE
from paceline.checkpoint.state import State, versions_of
from paceline.checkpoint.tensor_files import ALIASES, INDEX, Written, index_text, shard, size_of, untie, write, write_text

WEIGHTS_STEM, OPTIMIZER_STEM, OTHERS_STEM = "model", "optimizer", "state"
OPTIMIZERS = "optimizers"


@dataclass(frozen=True)
class Parts:
    """What goes into which file; everything that cannot be stored has been refused when this exists."""

    weights: dict[str, dict[str, Tensor]]
    others: dict[str, dict[str, Tensor]]
    aliases: dict[str, str]
    texts: dict[str, str]

    @classmethod
    def of(cls, state: State, shard_bytes: int) -> Parts:
        """Take a state apart.

        Raises:
            UsageError: something in it cannot be stored; the message names it.
        """
        tensors = {name: value for name, value in state.weights.items() if isinstance(value, Tensor)}
        extra = {name: value for name, value in state.weights.items() if not isinstance(value, Tensor)}
        distinct, aliases = untie(tensors)
        encoder = Encoder()
        words = {
            "weights": list(state.weights),
            "versions": encoder.encode(versions_of(state.weights), "versions"),
            "extra_state": encoder.encode(extra, "extra_state"),
            OPTIMIZERS: {
                name: encoder.encode(
                    {part.name: getattr(optimizer, part.name) for part in fields(optimizer)}, f"{OPTIMIZERS}/{name}"
                )
                for name, optimizer in state.optimizers.items()
            },
            **{
                part: encoder.encode(getattr(state, part), part)
                for part in ("progress", "schedulers", "random", "objects", "facts")
            },
        }
        weights = shard(distinct, WEIGHTS_STEM, shard_bytes)
        texts = {STATE: json.dumps(words, allow_nan=False) + "\n"}
        if len(weights) > 1:
            texts[INDEX] = index_text(weights)
        of_optimizers = {name: tensor for name, tensor in encoder.tensors.items() if name.startswith(f"{OPTIMIZERS}/")}
        rest = {name: tensor for name, tensor in encoder.tensors.items() if name not in of_optimizers}
        others = {
            **(shard(of_optimizers, OPTIMIZER_STEM, shard_bytes) if of_optimizers else {}),
            **(shard(rest, OTHERS_STEM, shard_bytes) if rest else {}),
        }
        return cls(weights, others, aliases, texts)

    @property
    def size(self) -> int:
        """About how many bytes the checkpoint takes."""
        tensors = sum(size_of(tensor) for part in (self.weights | self.others).values() for tensor in part.values())
        return (
            tensors
            + 2 * sum(len(text) for text in self.texts.values())
            + 256 * sum(map(len, (self.weights | self.others).values()))
        )

    def write(self, folder: Path) -> tuple[dict[str, tuple[int, str]], dict[str, Written]]:
        """Write all files but the manifest and return what it says of them: the texts, and the files of tensors.

        Raises:
            OSError: they cannot be written.
        """
        metadata: dict[str, Any] = {"format": "pt"}
        with_aliases = metadata | {ALIASES: json.dumps(self.aliases)}
        files = {name: write(folder / name, part, with_aliases) for name, part in self.weights.items()}
        files |= {name: write(folder / name, part, metadata) for name, part in self.others.items()}
        return {name: write_text(folder / name, text) for name, text in self.texts.items()}, files
