"""Order between the CUDA streams of several threads; on CPU all of this is nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def mark(tensors: Iterable[Tensor]) -> list[torch.cuda.Event]:
    """Return events that come to pass once what was issued so far for the tensors' devices is done."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def follow(events: Iterable[torch.cuda.Event], tensors: Iterable[Tensor]) -> None:
    """Make the current streams of the tensors' devices wait for `events`, without blocking the thread."""
    events = list(events)
    if events:
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            for event in events:
                torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def aside(tensors: Iterable[Tensor], events: Iterable[torch.cuda.Event]) -> Iterator[None]:
    """Work on a stream of its own that starts after `events`, so that another thread's computation is not held up."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for event in events:
        stream.wait_event(event)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
