"""Batches: their structure, their order, and the part of each that a process loads."""

from paceline.data.batch import aligned, count_rows, even_sizes, split_batch
from paceline.data.contents import count_valid, digest, find_value, pin, to_device
from paceline.data.join import concatenate
from paceline.data.local import LocalBatch, cut
from paceline.data.order import Position, epoch_order, global_batches
from paceline.data.source import Source

__all__ = [
    "LocalBatch",
    "Position",
    "Source",
    "aligned",
    "concatenate",
    "count_rows",
    "count_valid",
    "cut",
    "digest",
    "epoch_order",
    "even_sizes",
    "find_value",
    "global_batches",
    "pin",
    "split_batch",
    "to_device",
]
