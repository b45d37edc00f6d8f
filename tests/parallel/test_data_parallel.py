"""DataParallel in an ordinary loop: what the bare module gives, on several devices of one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.data.contents import count_valid
from paceline.errors import UsageError
from paceline.parallel.data_parallel import DataParallel
from tests.parallel.modules import MODULES, WIDTH, assert_same, batchnorm, dropout, gradients, mlp, twins, x_of

TWO = ["cpu", "cpu"]

pytestmark = pytest.mark.usefixtures("no_thread_stays")


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("devices", "rows"), [(2, 8), (2, 5), (2, 1), (3, 2), (3, 7)])
def test_gradients_are_those_of_all_rows(name: str, devices: int, rows: int) -> None:
    """Ragged batches and fewer rows than devices included; a layer that nobody uses has no gradient (L1, L2, L4, L7)."""
    module, reference = twins(MODULES[name])
    x = x_of(rows)
    output = DataParallel(module, ["cpu"] * devices)(x)
    torch.testing.assert_close(output, reference(x))
    output.square().mean().backward()
    reference(x).square().mean().backward()
    assert_same(gradients(module), gradients(reference))


def test_the_same_loop_with_and_without_the_wrapper() -> None:
    """The optimizer's steps in place are seen by the replicas; losses agree to rounding, step after step."""

    def loop(model: nn.Module) -> list[float]:
        torch.manual_seed(3)
        losses = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        data = torch.utils.data.TensorDataset(x_of(13), x_of(13, 2)[:, :2])
        for _ in range(3):
            for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):  # 13 rows: the last batch has one
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        return losses

    module, reference = twins(mlp)
    with_wrapper, without = loop(DataParallel(module, TWO)), loop(reference)
    torch.testing.assert_close(torch.tensor(with_wrapper), torch.tensor(without), rtol=1e-4, atol=1e-5)
    assert without[0] != without[-1]


class Meet(torch.autograd.Function):
    """Identity that waits for its peer: replicas that ran one after the other would wait for ever."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: threading.Barrier, backward: threading.Barrier) -> Tensor:
        ctx.backward_barrier = backward
        forward.wait(20)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.backward_barrier.wait(20)
        return gradient, None, None


def test_forwards_and_backwards_run_at_the_same_time() -> None:
    barriers = threading.Barrier(2), threading.Barrier(2)

    class Meeting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Meet.apply(super().forward(x), *barriers)

    DataParallel(Meeting(WIDTH, 2), TWO)(x_of(4)).sum().backward()
    assert not barriers[1].broken


@dataclass
class Out:
    hidden: Tensor
    loss: Tensor
    note: str = "same"
    nothing: None = None


class Many(nn.Module):
    """Returns all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, *, scale: float, texts: list[str], extra: dict[str, Tensor]) -> Any:
        y = self.layer(x) * scale
        assert len(texts) == len(x)
        return {"out": Out(y, y.square().mean()), "pair": (y.sum(1), extra["id"]), "rows": [row * 2 for row in y], "texts": texts}


def test_structures_keywords_and_several_losses() -> None:
    """Everything comes back in the module's structure; several losses, each with its own backward (L4, L5)."""
    module, reference = twins(Many)
    given = {"scale": 0.5, "texts": list("abcde"), "extra": {"id": torch.arange(5)}}
    results = []
    for model in (DataParallel(module, TWO), reference):
        output = model(x_of(5), **given)
        assert output["texts"] == list("abcde")
        assert (output["out"].note, output["out"].nothing) == ("same", None)
        assert output["pair"][1].tolist() == [0, 1, 2, 3, 4]
        (output["pair"][0].mean() + output["out"].loss).backward(retain_graph=True)
        first = gradients(model)
        torch.stack(output["rows"]).square().sum().backward()
        results.append((output["out"].hidden, output["out"].loss, first, gradients(model)))
    (hidden, loss, first, second), (hidden_2, loss_2, first_2, second_2) = results
    torch.testing.assert_close((hidden, loss), (hidden_2, loss_2))
    assert_same(first, first_2)
    assert_same(second, second_2)


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0)
    config.attn_pdrop = 0.0
    module, reference = twins(lambda: transformers.GPT2LMHeadModel(config))
    ids = torch.randint(0, 16, (3, 8), generator=torch.Generator().manual_seed(0))
    model = DataParallel(module, TWO)
    output, wanted = model(input_ids=ids, labels=ids, use_cache=False), reference(input_ids=ids, labels=ids)
    assert type(output) is type(wanted)
    torch.testing.assert_close((output.loss, output.logits), (wanted.loss, wanted.logits))
    output.loss.backward()
    wanted.loss.backward()
    assert_same(gradients(module), gradients(reference))
    with pytest.raises(UsageError, match="use_cache=False"):
        model(input_ids=ids)
    labels = ids.clone()
    labels[0, 1:] = -100
    with pytest.raises(UsageError, match="-100"):
        model(input_ids=ids, labels=labels, use_cache=False)
    counted = DataParallel(module, TWO, count=count_valid(shift=1))
    torch.testing.assert_close(
        counted(input_ids=ids, labels=labels, use_cache=False).loss, reference(input_ids=ids, labels=labels).loss
    )


def test_inputs_get_their_gradients() -> None:
    """Those that are cut, those that go whole to every replica, and those that the program has computed before."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    module, reference = twins(lambda: Scaled(WIDTH, 2))
    results = []
    for model in (DataParallel(module, TWO), reference):
        x, scale = x_of(5).requires_grad_(), torch.tensor(2.0, requires_grad=True)
        model(x.sin(), scale.exp()).square().sum().backward()
        results.append({"x": x.grad, "scale": scale.grad, **gradients(model)})
    assert_same(*results)


def test_two_forwards_one_backward_and_a_graph_kept() -> None:
    """BatchNorm between them included (I4)."""
    module, reference = twins(batchnorm)
    module[1].eval()
    reference[1].eval()
    model = DataParallel(module, TWO)
    for one in (model, reference):
        loss = one(x_of(5)).square().mean() + one(x_of(3, 2)).sin().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(module), gradients(reference))
    before = model(x_of(5))
    module.train()  # whose forwards move statistics that the graph before holds
    (before.sum() + model(x_of(5)).sum() + model(x_of(4)).sum()).backward()
    loss = model(x_of(4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batchnorm_takes_in_all_replicas_in_order(momentum: float | None) -> None:
    """Running statistics are those of one device that is given the replicas' rows one after the other (G1)."""
    module, reference = twins(lambda: batchnorm(momentum))
    model = DataParallel(module, TWO)
    for step in range(3):
        x = x_of(7, step)
        model(x).sum().backward()
        for part in (x[:4], x[4:]):
            reference(part)
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()))
    model.eval()
    torch.testing.assert_close(model(x_of(5)), reference.eval()(x_of(5)))


class Counter(nn.Module):
    """Counts rows in a buffer, and calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.calls = 0
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += len(x)
        return self.layer(x)


def test_other_buffers_are_refused_by_name_or_merged_by_their_rule() -> None:
    with pytest.raises(UsageError, match="rows"):
        DataParallel(Counter(), TWO)(x_of(3))
    module = Counter()
    model = DataParallel(module, TWO, buffers={"rows": "sum"})
    model(x_of(3))
    model(x_of(4))
    assert (module.rows.item(), module.calls) == (7, 2)


def test_masks_follow_the_seed_and_only_those_who_draw_leave_a_trace() -> None:
    module, reference = twins(dropout)
    model = DataParallel(module, TWO)
    x = x_of(1).expand(4, WIDTH)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([model(x), model(x)])
    assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0][:2], runs[0][0][2:])  # replicas draw masks of their own
    model.eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(model(x), reference.eval()(x))
    assert torch.equal(before, torch.get_rng_state())


def test_the_loss_with_masks_has_the_gradient_of_its_masks() -> None:
    """With dropout the gradient is that of the very masks of the forward: a small step changes the loss as it says."""
    module = dropout().double()
    model, x = DataParallel(module, TWO), x_of(6).double()

    def loss() -> Tensor:
        torch.manual_seed(5)
        return model(x).square().sum()

    value = loss()
    value.backward()
    step = 1e-6
    expected = -step * sum(float(p.grad.square().sum()) for p in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= step * parameter.grad
        moved = float(loss() - value)
    assert moved == pytest.approx(expected, rel=1e-3)


class Reseeding(torch.autograd.Function):
    """Identity whose backward puts a state of the process's generator in place, as recomputation does for a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.manual_seed(0)
        return gradient


def test_backward_leaves_the_generator_where_it_was() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Reseeding.apply(super().forward(x))

    output = DataParallel(Layer(WIDTH, 2), TWO)(x_of(5))
    torch.rand(3)
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_recomputation() -> None:
    """It runs in the replica's thread with the replica's weights (L8); where it would draw masks again it is refused."""

    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    module, reference = twins(lambda: Recomputed(mlp()))
    output = DataParallel(module, TWO)(x_of(5))
    torch.rand(3)
    before = torch.get_rng_state()
    output.sum().backward()
    reference(x_of(5)).sum().backward()
    assert_same(gradients(module), gradients(reference))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(UsageError, match="drawn again"):
        DataParallel(Recomputed(dropout()), TWO)(x_of(5)).sum().backward()
