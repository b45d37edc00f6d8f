"""Who takes part in a backward, and by what its sum of gradients is divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from paceline.errors import MismatchError, UsageError
from paceline.transport.base import Transport


class _Word(NamedTuple):
    """What a rank tells the others before a backward: whether it has a batch, of how many entries, and if that ends a window."""

    active: bool
    entries: float | None
    windowed: bool


class Participants:
    """The ranks that take part in the backward at hand.

    Ranks ask each other only where they must: within `join`, and where losses have counts. A *window* is an accumulation of losses
    with counts under `no_sync`; its gradients are scaled by their counts, and divided by the count of all ranks at its end.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.active = True
        self.joined = False
        self.settled = False
        self.divisor = float(transport.size)
        self.ranks = list(range(transport.size))
        self.window_open = False
        self._window_count = 0.0

    def settle(self, count: float | None) -> float:
        """Find out who takes part, where it is not known, and return what this rank's loss is multiplied by. Collective if so."""
        self.divisor = float(self._transport.size)
        if not self.joined and count is None:
            if self.window_open:
                raise _window_left()
            self.settled = True
            return 1.0
        mine = _Word(self.active, None if count is None else count + self._window_count, self.window_open)
        heard = [_Word(*word) for word in self._transport.gather_objects(tuple(mine))]
        self.ranks = [rank for rank, word in enumerate(heard) if word.active]
        words = [word for word in heard if word.active]
        counts = [word.entries for word in words if word.entries is not None]
        if counts and len(counts) < len(words):
            raise MismatchError("some ranks called model.backward(loss, count=...), others loss.backward(); call one on all ranks")
        if self.window_open and self.active and count is None:
            raise _window_left()
        self.settled = True
        self.divisor = float(max(1, len(self.ranks)))
        if not counts:
            return 1.0
        total = sum(counts)
        if not total:
            raise UsageError("the counts of all ranks are 0: the loss is a mean over nothing; leave this batch out on all ranks")
        if any(word.windowed for word in words):
            self.divisor = total
            return count or 0.0
        return (count or 0.0) * len(words) / total

    def accumulate(self, count: float) -> float:
        """Add to the window, and return what the loss is multiplied by."""
        self.window_open = True
        self._window_count += count
        return count

    def check_window(self, have_gradients: Iterable[bool], synchronise: bool) -> None:
        """Raise `UsageError` where a window would begin on top of gradients that its end would scale along."""
        if not synchronise and not self.window_open and any(have_gradients):
            raise UsageError(
                "model.backward(loss, count=...) within no_sync() begins an accumulation that is divided as a whole, and "
                "parameters have gradients already; call optimizer.zero_grad() before it"
            )

    def close(self) -> None:
        """Forget about the backward that has ended, and the window that ended with it."""
        self.settled = self.window_open = False
        self._window_count = 0.0


def _window_left() -> UsageError:
    return UsageError(
        "losses were accumulated by model.backward(loss, count=...) under no_sync(), and loss.backward() would end the "
        "accumulation without a count; use model.backward(loss, count=...)"
    )
