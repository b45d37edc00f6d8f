"""Processes that the tests of promises share, since starting torch takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers
