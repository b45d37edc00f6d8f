"""The order of sums does not depend on how micro-batches are dealt to ranks."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.sum_tree import PartialSums, nodes_of, sum_order


def join(a: Any, b: Any) -> Any:
    """Add in words: the expression shows the order."""
    return f"({a}+{b})"


def expression(runs: list[list[int]]) -> Any:
    """Return the sum of all micro-batches as the ranks and the transport form it together."""
    parts = []
    for run in runs:
        sums: PartialSums[Any] = PartialSums(join)
        for micro_batch in run:
            sums.push(micro_batch, str(micro_batch))
        parts.append(sums.values)

    def evaluate(order: Any) -> Any:
        left, right = order
        if isinstance(left, int):
            return parts[left][right]
        return join(evaluate(left), evaluate(right))

    order = sum_order(runs)
    return None if order is None else evaluate(order)


@st.composite
def splits(draw: Any) -> tuple[list[int], list[list[int]]]:
    """Micro-batches from 0 on, some of them without rows, cut into contiguous runs, some of them empty."""
    number = draw(st.integers(0, 24))
    present = draw(st.lists(st.booleans(), min_size=number, max_size=number))
    cuts = sorted(draw(st.lists(st.integers(0, number), max_size=5)))
    bounds = [0, *cuts, number]
    runs = [[i for i in range(a, b) if present[i]] for a, b in itertools.pairwise(bounds)]
    return [i for i in range(number) if present[i]], runs


@given(splits())
def test_every_split_into_runs_gives_the_expression_of_one_worker(case: tuple[list[int], list[list[int]]]) -> None:
    everything, runs = case
    assert expression(runs) == expression([everything])


@given(splits())
def test_every_micro_batch_is_summed_once(case: tuple[list[int], list[list[int]]]) -> None:
    everything, runs = case
    words = expression(runs)
    found = (
        [] if words is None else sorted(int(word) for word in words.replace("(", " ").replace(")", " ").replace("+", " ").split())
    )
    assert found == everything


@given(splits())
def test_an_order_names_every_partial_sum_once(case: tuple[list[int], list[list[int]]]) -> None:
    _, runs = case

    def leaves(order: Any) -> list[tuple[int, int]]:
        return [order] if isinstance(order[0], int) else leaves(order[0]) + leaves(order[1])

    order = sum_order(runs)
    expected = [(rank, part) for rank, run in enumerate(runs) for part in range(len(nodes_of(run)))]
    assert ([] if order is None else sorted(leaves(order))) == expected


@given(st.integers(0, 200), st.integers(1, 64))
def test_a_run_leaves_few_partial_sums(start: int, length: int) -> None:
    assert len(nodes_of(range(start, start + length))) <= 2 * length.bit_length()


def test_eight_micro_batches_are_a_balanced_tree() -> None:
    assert expression([list(range(8))]) == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_a_node_without_a_sibling_is_its_own_parent() -> None:
    assert expression([[0, 1, 2]]) == "((0+1)+2)"
    assert expression([[0], [3, 5]]) == "((0+3)+5)"
