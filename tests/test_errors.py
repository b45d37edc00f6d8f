"""The tree of errors is told in two places, in errors.py and in docs/errors.md; both must be the tree that is there."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import paceline
from paceline import errors
from paceline.errors import DeadlineError, Failure, MismatchError, PacelineError, PeerError, PlanError, UsageError

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
ENTRY = re.compile(r"^(?P<indent>[ |]*)\+-- (?P<name>\w+)(?: \((?P<also>\w+)\))?  +(?P<what>\S.*)$")

Tree = dict[str, tuple[str, str | None]]  # class -> (its parent, what else it is)


def real_tree() -> Tree:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, PacelineError)]
    tree: Tree = {}
    for kind in classes:
        if kind is not PacelineError:
            own, *others = kind.__bases__
            tree[kind.__name__] = (own.__name__, others[0].__name__ if others else None)
    return tree


def told_tree(text: str) -> tuple[Tree, dict[str, str]]:
    """Return the tree that a drawing shows, and what it says of each class."""
    tree: Tree = {}
    words = {}
    above = [(-1, "PacelineError")]
    for line in text.splitlines():
        read = ENTRY.match(line.removeprefix("    "))
        if read is None:
            continue
        depth = len(read["indent"])
        while above[-1][0] >= depth:
            above.pop()
        tree[read["name"]] = (above[-1][1], read["also"])
        words[read["name"]] = read["what"]
        above.append((depth, read["name"]))
    return tree, words


def test_tree_in_module_is_the_tree_of_the_classes() -> None:
    """The drawing at the top of errors.py shows every class under its parent."""
    assert told_tree(errors.__doc__ or "")[0] == real_tree()


def test_tree_in_page_is_the_tree_in_module() -> None:
    """docs/errors.md draws the same tree with the same words, and has a section for every class."""
    page = PAGE.read_text()
    assert told_tree(page) == told_tree(errors.__doc__ or "")
    sections = re.findall(r"^## `(\w+)`", page, re.MULTILINE)
    assert sorted(sections) == sorted([*real_tree(), "PacelineError"])


def test_every_error_is_public() -> None:
    """Whoever wants to catch an error finds it at the front door."""
    assert {*real_tree(), "PacelineError"} <= set(paceline.__all__)


@pytest.mark.parametrize(("kind", "also"), [(UsageError, ValueError), (PlanError, ValueError), (DeadlineError, TimeoutError)])
def test_error_is_caught_by_the_name_that_python_gives_its_kind(kind: type[Exception], also: type[Exception]) -> None:
    """Code that knows nothing of Paceline still catches these."""
    assert issubclass(kind, also)


def test_failure_says_where() -> None:
    """A failure reads as rank, step, micro-batch, action, exception; what is not known is left out."""
    failure = Failure(rank=1, error="ValueError", message="no", step=3, micro_batch=2, doing="forward of h.0")
    assert str(failure) == "rank 1, step 3, micro-batch 2, forward of h.0: ValueError: no"
    assert str(Failure(rank=0, error="OSError", message="no")) == "rank 0: OSError: no"


def test_peer_error_travels_between_processes() -> None:
    """A PeerError can be pickled, and carries the same failure then."""
    error = pickle.loads(pickle.dumps(PeerError(Failure(rank=1, error="ValueError", message="no"))))
    assert isinstance(error, PeerError)
    assert error.failure == Failure(rank=1, error="ValueError", message="no")


def test_failure_of_a_peer_error_is_the_first_failure() -> None:
    """Whoever hears of a failure passes on that one, not its own hearing of it."""
    first = Failure(rank=1, error="ValueError", message="no")
    assert Failure.of(PeerError(first), rank=0) == first
    made = Failure.of(MismatchError("other shapes"), rank=0, step=4)
    assert (made.error, made.message, made.step) == ("MismatchError", "other shapes", 4)
