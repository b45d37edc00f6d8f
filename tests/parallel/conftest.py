"""Processes that the tests of wrappers share, since starting torch takes seconds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tests.processes import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """No replica's thread outlives its wrapper, however the test went about it."""
    yield
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-replica")]
