"""Who does what: ranks to places, micro-batches to replicas."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Layout, Place, PlanError
from paceline.layout import deal


@given(st.integers(0, 300), st.integers(1, 40))
def test_dealing_covers_all_in_order_and_evenly(total: int, parts: int) -> None:
    runs = deal(total, parts)
    assert len(runs) == parts
    assert [i for run in runs for i in run] == list(range(total))
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_every_place_has_one_rank_whatever_the_hosts(replicas: int, stages: int, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=replicas * stages, max_size=replicas * stages))
    layout = Layout.of(replicas=replicas, stages=stages, micro_batches=replicas, hosts=hosts)
    assert sorted((place.replica, place.stage) for place in layout.places) == [
        (r, s) for r in range(replicas) for s in range(stages)
    ]
    for rank, place in enumerate(layout.places):
        assert layout.rank_of(place.replica, place.stage) == rank
    assert sorted(i for rank in range(len(hosts)) if not layout.places[rank].stage for i in layout.micro_batches_of(rank)) == list(
        range(replicas)
    )


@given(st.integers(1, 5), st.data())
def test_as_many_replicas_as_can_lie_on_one_host(stages: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    hosts = data.draw(st.permutations([name for name, count in zip("abcd", counts, strict=False) for _ in range(count)]))
    hosts = hosts[: len(hosts) // stages * stages]
    if not hosts:
        return
    layout = Layout.of(replicas=len(hosts) // stages, stages=stages, micro_batches=len(hosts), hosts=hosts)
    homes = [{hosts[layout.rank_of(replica, stage)] for stage in range(stages)} for replica in range(len(hosts) // stages)]
    assert sum(len(home) == 1 for home in homes) == sum(hosts.count(host) // stages for host in set(hosts))


def test_on_one_host_ranks_are_dealt_in_order() -> None:
    layout = Layout.of(replicas=2, stages=2, micro_batches=5)
    assert layout.places == (Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1))
    assert [list(layout.micro_batches_of(rank)) for rank in range(4)] == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]


def test_hosts_that_alternate_keep_each_replica_together() -> None:
    layout = Layout.of(replicas=2, stages=2, micro_batches=2, hosts=["a", "b", "a", "b"])
    assert layout.places == (Place(0, 0), Place(1, 0), Place(0, 1), Place(1, 1))


def test_another_number_of_ranks_is_refused() -> None:
    message = "replicas=2 x stages=2 needs 4 workers, got 3; start 4 workers, or leave replicas out to use them all"
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        Layout.of(replicas=2, stages=2, micro_batches=4, hosts=["a"] * 3)
