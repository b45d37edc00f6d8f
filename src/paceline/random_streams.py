"""Random numbers that depend on what is computed, never on who computes it.

Every draw belongs to a stream named by integers - (seed, step, micro-batch) in a forward, (seed, epoch, sample) in
`__getitem__` - and the three generators that user code draws from (torch, numpy, Python) are seeded from that name.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def stream_seed(*name: int | str) -> int:
    """Return the 63-bit seed of the stream called `name`; other names give unrelated seeds, on every machine the same.

    >>> stream_seed("mask", 0, 1) == stream_seed("mask", 0, 1) != stream_seed("mask", 1, 0)
    True
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in name)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def use_random_stream(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the process-wide generators of torch (CPU and `device`), numpy and Python inside the block, and put them back after it.

    For code that is alone in its process: worker threads that share one use a generator each instead.
    """
    state_torch, state_numpy, state_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = device if device is not None and device.type == "cuda" else None
    state_cuda = None if cuda is None else torch.cuda.get_rng_state(cuda)
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        if cuda is not None:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(state_torch)
        np.random.set_state(state_numpy)
        random.setstate(state_python)
        if cuda is not None and state_cuda is not None:
            torch.cuda.set_rng_state(state_cuda, cuda)
