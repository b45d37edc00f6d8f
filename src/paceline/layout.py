"""Who does what: ranks dealt to replicas and stages, micro-batches dealt to replicas. Pure values, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PlanError


def deal(total: int, parts: int) -> tuple[range, ...]:
    """Return `parts` contiguous ranges that cover 0..total, in order, their lengths differing by at most one, the longer first.

    >>> deal(13, 2)
    (range(0, 7), range(7, 13))
    >>> [len(part) for part in deal(3, 4)]
    [1, 1, 1, 0]
    """
    size, longer = divmod(total, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(starts))


@dataclass(frozen=True)
class Place:
    """What a rank holds: stage `stage` of replica `replica`, both counted from 0."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Layout:
    """Places of all ranks and the micro-batches of all replicas.

    >>> layout = Layout.of(replicas=2, stages=2, micro_batches=5)
    >>> layout.places[3], layout.rank_of(1, 0), layout.micro_batches[1]
    (Place(replica=1, stage=1), 2, range(3, 5))
    """

    places: tuple[Place, ...]
    micro_batches: tuple[range, ...]

    @classmethod
    def of(cls, *, replicas: int, micro_batches: int, stages: int = 1, hosts: Sequence[str] | None = None) -> Layout:
        """Return the layout in which the stages of a replica share a host wherever that is possible.

        Args:
            replicas: number of replicas, at least 1.
            micro_batches: number of micro-batches of a global batch, at least `replicas`.
            stages: number of stages of each replica, at least 1.
            hosts: the name of each rank's host, in rank order; None means that all ranks share one.

        Raises:
            PlanError: there are not replicas x stages ranks.
        """
        hosts = [""] * (replicas * stages) if hosts is None else list(hosts)
        if len(hosts) != replicas * stages:
            raise PlanError(
                f"replicas={replicas} x stages={stages} needs {replicas * stages} workers, got {len(hosts)}; "
                f"start {replicas * stages} workers, or leave replicas out to use them all"
            )
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        # Whole replicas first, host by host; the ranks that are left over on each host then make up the others.
        whole = [ranks[: len(ranks) // stages * stages] for ranks in by_host.values()]
        rest = [rank for ranks in by_host.values() for rank in ranks[len(ranks) // stages * stages :]]
        groups = [ranks[i : i + stages] for ranks in [*whole, rest] for i in range(0, len(ranks), stages)]
        places = {rank: (replica, stage) for replica, ranks in enumerate(sorted(groups)) for stage, rank in enumerate(ranks)}
        return cls(
            places=tuple(Place(*places[rank]) for rank in range(len(hosts))),
            micro_batches=deal(micro_batches, replicas),
        )

    def rank_of(self, replica: int, stage: int) -> int:
        """Return the rank that holds a stage of a replica."""
        return self.places.index(Place(replica, stage))

    def micro_batches_of(self, rank: int) -> range:
        """Return the micro-batches that a rank's replica works on."""
        return self.micro_batches[self.places[rank].replica]
