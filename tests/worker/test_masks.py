"""A worker thread draws the numbers that the seeded default generator would have given, and never touches that one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.worker.masks import ProcessMasks, SharedDraws, ThreadMasks

CPU = torch.device("cpu")
X = torch.linspace(-2, 2, 48).view(2, 4, 6)


torch.manual_seed(0)
_LSTM = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
_GRU = nn.GRU(6, 6, num_layers=2, dropout=0.5)
_ATTENTION = nn.MultiheadAttention(6, 2, dropout=0.5)
_LAYER = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3)

DRAWS: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "dropout of channels": lambda: F.dropout1d(X, 0.5),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature alpha dropout": lambda: F.feature_alpha_dropout(X, 0.5, training=True),
    "torch.dropout": lambda: torch.dropout(X, 0.5, True),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "multi-head attention": lambda: _ATTENTION(X, X, X)[0],
    "encoder layer": lambda: _LAYER(X),
    "lstm": lambda: _LSTM(X)[0],
    "gru": lambda: _GRU(X)[0],
    "rand": lambda: torch.rand(5),
    "rand, double": lambda: torch.rand(3, dtype=torch.float64),
    "randn": lambda: torch.randn(40),
    "randint": lambda: torch.randint(0, 9, (7,)),
    "randperm": lambda: torch.randperm(11),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 9),
    "normal": lambda: torch.normal(0.0, 1.0, (4,)),
    "normal of tensors": lambda: torch.normal(X, X.abs() + 1),
    "normal_": lambda: torch.empty(6).normal_(),
    "uniform_": lambda: torch.empty(6).uniform_(),
    "exponential_": lambda: torch.empty(6).exponential_(),
    "random_": lambda: torch.empty(6).random_(),
    "bernoulli_": lambda: torch.empty(6).bernoulli_(0.4),
    "bernoulli": lambda: torch.bernoulli(torch.full((6,), 0.4)),
    "multinomial": lambda: torch.multinomial(torch.arange(1.0, 6), 3),
    "poisson": lambda: torch.poisson(X.abs()),
    "categorical": lambda: torch.distributions.Categorical(torch.arange(1.0, 6)).sample((4,)),
    "normal distribution": lambda: torch.distributions.Normal(0.0, 1.0).rsample((4,)),
    "gamma distribution": lambda: torch.distributions.Gamma(torch.ones(4), 1.0).sample(),
    "initialisation": lambda: nn.init.kaiming_uniform_(torch.empty(4, 4)),
    "truncated initialisation": lambda: nn.init.trunc_normal_(torch.empty(4, 4)),
    "a new layer": lambda: nn.Linear(3, 3).weight,
    "rrelu": lambda: F.rrelu(X, training=True),
    "gumbel softmax": lambda: F.gumbel_softmax(X),
    "fractional pooling": lambda: F.fractional_max_pool2d(X.view(1, 2, 4, 6), 2, output_size=2),
}


def seeded(draw: Callable[[], Any]) -> tuple[Any, Any]:
    """Return two draws in a row from the seeded default generator, which is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        return draw(), draw()


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_what_the_seeded_default_generator_gives(name: str) -> None:
    before = torch.get_rng_state()
    masks = ThreadMasks(SharedDraws())
    try:
        with masks.use(77, CPU):
            found = DRAWS[name](), DRAWS[name]()
    except UsageError as error:
        pytest.skip(f"refused: {error}")  # never wrong in silence
    assert torch.equal(torch.get_rng_state(), before)
    expected = seeded(DRAWS[name])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(expected[0], expected[1]) or name in ("bernoulli_", "bernoulli", "fractional pooling")  # of few values


def test_most_draws_are_given_and_not_refused() -> None:
    refused = []
    for name, draw in DRAWS.items():
        try:
            with ThreadMasks(SharedDraws()).use(77, CPU):
                draw()
        except UsageError:
            refused.append(name)
    assert set(refused) <= {"poisson", "rrelu", "gamma distribution", "randint_like"}, refused


def test_a_generator_of_the_users_is_left_alone() -> None:
    with ThreadMasks(SharedDraws()).use(77, CPU):
        found = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_the_same_stream_can_be_used_again() -> None:
    masks = ThreadMasks(SharedDraws())
    results = []
    for seed in (1, 2, 1):
        with masks.use(seed, CPU):
            results.append(torch.rand(4))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_nothing_may_be_drawn_in_a_backward() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * F.dropout(torch.ones_like(gradient), 0.5)

    masks = ThreadMasks(SharedDraws())
    x = torch.ones(4, requires_grad=True)
    with masks.use(1, CPU):
        y = Noise.apply(x).sum()
        with pytest.raises(UsageError, match="drawn again during backward"):
            masks.backward(y, torch.ones_like(y), None)


@pytest.mark.parametrize("name", ["torch", "numpy", "Python"])
def test_a_draw_from_what_the_process_has_only_one_of_is_noticed(name: str) -> None:
    shared = SharedDraws()
    shared.mark()
    shared.check()
    {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "Python": random.random}[name]()
    with pytest.raises(UsageError, match=f"the model draws from {name}'s generator"):
        shared.check()


def test_a_process_seeds_all_generators_and_puts_them_back() -> None:
    draws = []
    before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
    for _ in range(2):
        with ProcessMasks().use(9, CPU):
            draws.append((torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()))
    assert draws[0] == draws[1]
    assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
