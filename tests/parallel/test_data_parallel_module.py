"""DataParallel is a module among modules: hooks, names, copies, exceptions, and what the program does to its weights."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from tests.parallel.modules import MODULES, WIDTH, assert_same, batchnorm, gradients, mlp, x_of

TWO = ["cpu", "cpu"]

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_hooks_see_the_sum_once() -> None:
    module = MODULES["branches"]()
    seen: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient)))
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name + " after", p.grad)))
    heard: list[int] = []
    model = DataParallel(module, TWO)
    model(x_of(3))
    module.always.register_forward_hook(lambda module, args, output: heard.append(len(output)))  # after wrapping
    model(x_of(5)).sum().backward()
    assert sorted(heard) == [2, 3]
    assert sorted(name for name, _ in seen) == ["always.bias", "always.bias after", "always.weight", "always.weight after"]
    assert all(torch.equal(gradient, module.get_parameter(name.removesuffix(" after")).grad) for name, gradient in seen)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            raise KeyError("too large")
        return super().forward(x)


def test_an_exception_keeps_its_type_and_says_where() -> None:
    module = Failing(WIDTH, 2)
    model = DataParallel(module, TWO)
    x = x_of(5)
    x[4] = 1000
    with pytest.raises(KeyError, match="too large") as caught:
        model(x)
    assert caught.value.__notes__ == ["replica 1 of 2 on cpu, rows 3 to 4 of the call"]
    model(x_of(5)).sum().backward()  # and the next batch goes on
    assert module.weight.grad is not None


def test_what_is_refused() -> None:
    module = mlp()
    model = DataParallel(module, TWO)
    with pytest.raises(UsageError, match="0 rows"):
        model(x_of(0))
    with pytest.raises(UsageError, match="disagree"):
        DataParallel(nn.Bilinear(WIDTH, WIDTH, 1), TWO)(x_of(2), x_of(3))
    with pytest.raises(UsageError, match="create_graph"):
        model(x_of(4)).sum().backward(create_graph=True)
    with pytest.raises(UsageError, match="devices"):
        DataParallel(module, [])
    loss = model(x_of(4)).square().sum()
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"'0\.weight' has been modified"):
        loss.backward()

    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).T

    with pytest.raises(UsageError, match="cannot be joined"):
        DataParallel(Transposed(WIDTH, 3), TWO)(x_of(5))


def test_weights_that_are_replaced_are_seen() -> None:
    """New memory (`assign=True`, `.data =`), another dtype, a layer more: the replicas follow."""
    module, other = mlp(), mlp()
    nn.init.ones_(other[0].weight)
    model, x = DataParallel(module, TWO), x_of(5)
    model(x)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(model(x), other(x))
    module[0].weight.data = torch.zeros_like(module[0].weight)
    torch.testing.assert_close(model(x), module(x))
    module.double()
    torch.testing.assert_close(model(x.double()), module(x.double()))
    module.append(nn.Linear(2, 3).double())
    assert model(x.double()).shape == (5, 3)
    module[0].weight.requires_grad_(False)
    model(x.double()).sum().backward()
    assert module[0].weight.grad is None


def test_parameters_from_outside_are_reached() -> None:
    """An adapter put in by replacing `forward` trains as without the wrapper (A10)."""

    def adapted() -> tuple[nn.Module, nn.Parameter]:
        module, adapter = mlp(), nn.Parameter(torch.full((WIDTH, 8), 0.1))
        plain = module[0].forward
        module[0].forward = lambda x: plain(x) + x @ adapter
        return module, adapter

    (module, adapter), (reference, other) = adapted(), adapted()
    DataParallel(module, TWO)(x_of(5)).square().sum().backward()
    reference(x_of(5)).square().sum().backward()
    assert_same({"adapter": adapter.grad, **gradients(module)}, {"adapter": other.grad, **gradients(reference)})


def test_the_callers_modes_hold_in_the_replicas() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    seen: list[Any] = []

    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append((y.dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), word.get(), self.training))
            return y

    model = DataParallel(Looking(WIDTH, 2), TWO)
    word.set("caller's")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x_of(4)).float().sum().backward()
    with torch.no_grad():
        assert not model.eval()(x_of(4)).requires_grad
    with torch.inference_mode():
        assert model(x_of(4)).is_inference()
    assert seen == [
        *[(torch.bfloat16, True, False, "caller's", True)] * 2,
        *[(torch.float32, False, False, "caller's", False)] * 2,
        *[(torch.float32, False, True, "caller's", False)] * 2,
    ]


def test_names_copies_and_attributes() -> None:
    module = batchnorm()
    module.hint = "mine"
    model = DataParallel(module, TWO)
    model(x_of(4))
    assert model.module is module
    assert (model.hint, len(list(model.parameters()))) == ("mine", 6)
    assert list(model.state_dict()) == list(module.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = model.nonsense
    fresh = batchnorm()
    nn.init.zeros_(fresh[0].weight)
    for state in (model.state_dict(), {f"module.{key}": value for key, value in model.state_dict().items()}):
        for target in (DataParallel(copy.deepcopy(fresh), TWO), nn.Sequential(DataParallel(copy.deepcopy(fresh), TWO))):
            nested = isinstance(target, nn.Sequential)
            target.load_state_dict({f"0.{key}": value for key, value in state.items()} if nested else state)
            inner = target[0] if nested else target
            assert_same(dict(inner.state_dict()), dict(module.state_dict()))
            assert list(target.state_dict()) == [f"{'0.' if nested else ''}{key}" for key in module.state_dict()]
    assert "missing" in str(model.load_state_dict({}, strict=False))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin.eval()(x_of(3)), copy.deepcopy(module).eval()(x_of(3)))


def test_a_wrapper_may_go_before_its_backward() -> None:
    module = mlp()
    loss = DataParallel(module, TWO)(x_of(4)).sum()
    gc.collect()
    loss.backward()
    assert module[0].weight.grad is not None
    model = DataParallel(module, TWO)
    model(x_of(4))
    model.close()
    model.close()
    model(x_of(4)).sum().backward()


def test_nothing_holds_on_to_a_step() -> None:
    """Memory goes with the last reference, without waiting for the garbage collector."""
    import weakref

    model = DataParallel(mlp(), TWO)
    gc.collect()
    gc.disable()
    try:
        output = model(x_of(4))
        reference = weakref.ref(output.grad_fn)
        output.sum().backward()
        del output
        assert reference() is None
    finally:
        gc.enable()
