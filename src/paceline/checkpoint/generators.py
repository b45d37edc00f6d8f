"""The process-wide random generators that user code draws from: torch's (CPU and GPUs), numpy's and Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from paceline.errors import UsageError


def random_states() -> dict[str, Any]:
    """Return the states of all generators, as tensors and plain values.

    >>> before = random_states()
    >>> draws = torch.rand(1), np.random.rand(), random.random()
    >>> set_random_states(before)
    >>> draws == (torch.rand(1), np.random.rand(), random.random())
    True
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": np.random.get_state(legacy=False), "python": random.getstate()}


def set_random_states(states: dict[str, Any]) -> None:
    """Put the generators back into saved states. Of the GPUs as many as there are here: a run may go on on fewer, or on none.

    Raises:
        UsageError: a state is not one of its generator; none is changed then.
    """
    before = random_states()
    try:
        _set(states)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        _set(before)
        raise UsageError(f"these are not states of random generators ({error}); pass what random_states() returned") from error


def _set(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state.cpu(), device)
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
