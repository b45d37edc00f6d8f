"""What happens to an exception from the user's dataset: it gains a note, and travels from a worker as what it is."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Noting:
    """Gives an exception that leaves the block a note of what was being done; its type and traceback stay.

    A StopIteration becomes a RuntimeError: to a loader it would be the end of the data, and rows would be lost silently.
    (For the same reason this is not a `contextlib.contextmanager`, which would turn it back.)
    """

    def __init__(self, what: Callable[[], str]) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, StopIteration):
            stopped = RuntimeError("the dataset raised StopIteration, which may only end an iterator")
            stopped.add_note(self.what())
            raise stopped from error
        if isinstance(error, Exception):
            error.add_note(self.what())


def packed(error: Exception) -> bytes:
    """Return `error` as bytes for another process, with its traceback as a note.

    Torch would make a new exception of the same type from one text, which fails for types that take other arguments
    and leaves the consumer waiting where the type itself cannot be pickled.
    """
    trace = "".join(traceback.format_exception(error))
    notes = [*getattr(error, "__notes__", []), f"raised in a worker of the data loader:\n{trace}"]
    for form in (error, (type(error), error.args, dict(vars(error)))):
        try:
            data = pickle.dumps((form, notes))
            if type(unpacked(data)) is type(error):
                return data
        except Exception:  # whatever the user's class objects to: the next form is plainer
            continue
    return pickle.dumps((RuntimeError(f"{type(error).__qualname__}: {error}"), notes))


def unpacked(data: bytes) -> Exception:
    """Return the exception that `packed` made `data` of."""
    form: Any
    form, notes = pickle.loads(data)
    if isinstance(form, Exception):
        error = form
    else:  # its __init__ takes something other than its args: leave it out
        kind, arguments, attributes = form
        error = kind.__new__(kind, *arguments)
        error.args = arguments
        vars(error).update(attributes)
    error.__notes__ = notes
    return error
