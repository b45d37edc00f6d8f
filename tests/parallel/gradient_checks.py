"""What every rank asserts about gradients in the tests of DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import MismatchError, UsageError
from tests.parallel.modules import MODULES, WIDTH, assert_same, batchnorm, gradients, mlp, twins, x_of
from tests.parallel.ranks import Check, loss_of, parts, wrap


def same_gradients(rank: int, size: int) -> None:
    """Step after step those of one device on all rows, in one bucket and in many, whatever order rank 0 has learnt."""
    for name in MODULES:
        for bucket_bytes in (64, 2**20):
            module, reference = twins(MODULES[name])
            model = wrap(module, bucket_bytes=bucket_bytes)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, reference)]
            for step in range(3):
                loss_of(model(parts(size, step)[rank])).backward()
                loss_of(reference(torch.cat(parts(size, step)))).backward()
                assert_same(gradients(module), gradients(reference))
                norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
                torch.testing.assert_close(*norms)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same(dict(module.state_dict()), dict(reference.state_dict()))


def weights_of_rank_0(rank: int, size: int) -> None:
    module = mlp()
    with torch.no_grad():
        module[0].weight.fill_(float(rank + 5))
    wrap(module)
    assert bool((module[0].weight == 5).all())


def other_modules(rank: int, size: int) -> None:
    """Another name, shape, order, or fewer parameters: all ranks say where the first difference is (I8, I9)."""
    last = rank == size - 1
    swapped = nn.ModuleDict({name: nn.Linear(2, 2) for name in (["b", "a"] if last else ["a", "b"])})
    for module, word in (
        (nn.Linear(2, 3 if last else 2), r"'weight' \(float32\[3, 2\]\)"),
        (swapped, "'b.weight'"),
        (nn.Linear(2, 2, bias=not last), "nothing more"),
    ):
        with pytest.raises(MismatchError, match=word):
            wrap(module)
    with pytest.raises(UsageError, match=r"nothing to train.*frozen"):
        wrap(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UsageError, match="no parameters"):
        wrap(nn.ReLU())


def unused_parameters(rank: int, size: int) -> None:
    """No flag: what one rank uses has a gradient on all, what nobody uses has none (I1, I2)."""
    module, reference = twins(MODULES["branches"])
    model = wrap(module, bucket_bytes=64)
    for _ in range(3):
        module.zero_grad()
        reference.zero_grad()
        loss_of(model(parts(size)[rank], branch=rank == 0)).backward()
        for other in range(size):
            (loss_of(reference(parts(size)[other], branch=other == 0)) / size).backward()
        assert_same(gradients(module), gradients(reference))
        assert module.never.weight.grad is None


class Perhaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, skip: bool) -> dict[str, Tensor]:
        return {"y": x[:, :2] * 1.0 if skip else self.layer(x)}


def no_parameter_reached(rank: int, size: int) -> None:
    """A rank whose loss depends on no parameter, or on an input that requires a gradient alone, takes part."""
    module, reference = twins(Perhaps)
    model = wrap(module)
    for needs in (False, True):
        module.zero_grad()
        x = parts(size)[rank].requires_grad_(needs)
        output = model(x, skip=rank > 0)["y"]
        output += 1.0  # the program may go on to change it
        loss_of(output).backward()
        reference.zero_grad()
        loss_of(reference(parts(size)[0], skip=False)["y"] + 1.0).backward()
        assert_same(gradients(module), {name: g / size for name, g in gradients(reference).items()})
        assert (x.grad is not None) == needs
    module.zero_grad()
    loss_of(model(parts(size)[rank], skip=True)["y"]).backward()
    assert module.layer.weight.grad is None


def accumulation(rank: int, size: int) -> None:
    """`no_sync` goes by where backward is called, not the forward (A14); what one rank has accumulated is averaged whole."""
    for forward_inside in (True, False):
        module, reference = twins(MODULES["branches"])
        model = wrap(module, bucket_bytes=64)
        for step in range(2):
            module.zero_grad()
            reference.zero_grad()
            first, second = parts(size, step)[rank], parts(size, step + 7)[rank]
            if forward_inside:
                with model.no_sync():
                    loss_of(model(first, branch=rank == 0)).backward()
            else:
                output = model(first, branch=rank == 0)
                with model.no_sync():
                    loss_of(output).backward()
            local = copy.deepcopy(reference)
            loss_of(local(first, branch=rank == 0)).backward()
            assert_same(gradients(module), gradients(local))
            with model.no_sync():
                output = model(second)
            loss_of(output).backward()  # does not use `sometimes`, whose accumulated gradient goes along
            for other in range(size):
                (loss_of(reference(parts(size, step)[other], branch=other == 0)) / size).backward()
                (loss_of(reference(parts(size, step + 7)[other])) / size).backward()
            assert_same(gradients(module), gradients(reference))


def several_passes(rank: int, size: int) -> None:
    """Two forwards before a backward, two backwards of one graph, backwards without zeroing in between (I4)."""
    module, reference = twins(batchnorm)
    model = wrap(module)
    mine = parts(size)[rank]
    loss = loss_of(model(mine)) + loss_of(model(mine * 2))
    loss.backward(retain_graph=True)
    loss.backward()
    for x in parts(size):
        (2 * (loss_of(reference(x)) + loss_of(reference(x * 2))) / size).backward()
    assert_same(gradients(module), gradients(reference))


def frozen_and_unfrozen(rank: int, size: int) -> None:
    """Layers may be frozen and freed after wrapping (I10), and the parameters replaced."""
    module = mlp()
    module[0].requires_grad_(False)
    reference = copy.deepcopy(module)
    model = wrap(module)
    for step in range(4):
        for m in (module, reference):
            m.zero_grad()
            m[0].requires_grad_(step % 2 == 1)
            m[2].bias.requires_grad_(step < 2)
        if step == 3:
            model.load_state_dict(model.state_dict(), assign=True)
            module[0].requires_grad_(True)
            module[2].bias.requires_grad_(False)
        loss_of(model(parts(size)[rank])).backward()
        loss_of(reference(torch.cat(parts(size)))).backward()
        assert_same(gradients(module), gradients(reference))


def past_the_wrapper(rank: int, size: int) -> None:
    """A loss taken through the bare module is averaged all the same (A8), and so is BatchNorm."""
    module, reference = twins(batchnorm)
    model = wrap(module)
    for _ in range(2):
        loss_of(model.module(parts(size)[rank])).backward()
        for x in parts(size):
            (loss_of(reference(x)) / size).backward()
    assert_same(gradients(module), gradients(reference))
    assert_same(dict(module.named_buffers()), dict(reference.named_buffers()))


def counts(rank: int, size: int) -> None:
    """`backward(loss, count)` gives the gradient of the mean over all entries, accumulated or not; a rank may have none."""
    module, reference = twins(mlp)
    model = wrap(module)
    lots = [x_of(1 + 2 * r, r) for r in range(size)]
    for _ in range(2):
        module.zero_grad()
        reference.zero_grad()
        model.backward(model(lots[rank]).square().sum(1).mean(), count=len(lots[rank]))
        reference(torch.cat(lots)).square().sum(1).mean().backward()
        assert_same(gradients(module), gradients(reference))
    module.zero_grad()
    more = [x_of(2 + r, 9 + r) for r in range(size)]
    with model.no_sync():
        model.backward(model(lots[rank]).square().sum(1).mean(), count=torch.tensor(len(lots[rank])))
    model.backward(model(more[rank]).square().sum(1).mean(), count=len(more[rank]))
    reference.zero_grad()
    reference(torch.cat(lots + more)).square().sum(1).mean().backward()
    assert_same(gradients(module), gradients(reference))
    module.zero_grad()
    reference.zero_grad()
    nothing = model(lots[rank])[: 0 if rank == 0 else None].square().mean()  # on rank 0 a mean over nothing, NaN
    model.backward(nothing, count=0 if rank == 0 else 2 * len(lots[rank]))
    reference(torch.cat(lots[1:])).square().mean().backward()
    assert_same(gradients(module), gradients(reference))
    with pytest.raises(UsageError, match="mean over nothing"):
        model.backward(nothing, count=0)
    with model.no_sync(), pytest.raises(UsageError, match="have gradients already"):
        model.backward(loss_of(model(lots[rank])), count=1)
    module.zero_grad()
    with model.no_sync():
        model.backward(loss_of(model(lots[rank])), count=1)
    with pytest.raises(UsageError, match="accumulat"):
        loss_of(model(lots[rank])).backward()


def gradients_that_are_held(rank: int, size: int) -> None:
    """Gradients that the program keeps are not overwritten by the next backward; hooks see the rank's own."""
    module = mlp()
    model = wrap(module)
    seen: list[Tensor] = []
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(2):
        loss_of(model(parts(size)[rank])).backward()
        module.zero_grad()
    loss_of(model(parts(size)[rank])).backward()
    kept = {name: parameter.grad for name, parameter in module.named_parameters()}
    before = gradients(module)
    module.zero_grad()
    loss_of(model(parts(size, 3)[rank])).backward()
    assert_same(kept, before, 0.0)
    assert not torch.equal(kept["0.weight"], module[0].weight.grad)
    assert len(seen) == 4
    assert not torch.allclose(seen[2], before["0.weight"])


def gradients_of_inputs(rank: int, size: int) -> None:
    """A penalty on gradients of inputs communicates nothing by itself; what cannot be averaged is refused."""
    module, reference = twins(mlp)
    model = wrap(module)

    def penalised(m: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = m(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return loss_of(output) + slope.square().mean()

    number = model._reducer._number
    penalised(model, parts(size)[rank])
    assert model._reducer._number == number
    penalised(model, parts(size)[rank]).backward()
    penalised(reference, torch.cat(parts(size))).backward()
    torch.testing.assert_close(module[0].weight.grad, _mean_over_ranks(module, penalised, parts(size)))
    with pytest.raises(UsageError, match=r"autograd\.grad over parameters"):
        torch.autograd.grad(loss_of(model(parts(size)[rank])), list(module.parameters()))
    with pytest.raises(UsageError, match="create_graph"):
        loss_of(model(parts(size)[rank])).backward(create_graph=True)


def _mean_over_ranks(module: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], lots: list[Tensor]) -> Tensor:
    bare = copy.deepcopy(module)
    bare.zero_grad()
    for x in lots:
        (loss(bare, x) / len(lots)).backward()
    assert bare[0].weight.grad is not None
    return bare[0].weight.grad


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.head, self.reentrant = mlp(), nn.Linear(2, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant))


def recomputation(rank: int, size: int) -> None:
    """Within the backward of one model, reentrant or not, several times in a row (E17)."""
    for reentrant in (False, True):
        module, reference = twins(lambda reentrant=reentrant: Recomputing(reentrant))
        model = wrap(module, bucket_bytes=64)
        for _ in range(3):
            module.zero_grad()
            reference.zero_grad()
            loss_of(model(parts(size)[rank])).backward()
            loss_of(reference(torch.cat(parts(size)))).backward()
            assert_same(gradients(module), gradients(reference))


def half_precision(rank: int, size: int) -> None:
    """The sum of large half gradients does not overflow on its way to the average (D16)."""
    module = nn.Linear(1, 1, bias=False).half()
    model = wrap(module)
    (model(torch.ones(1, 1).half()) * 60000).sum().backward()
    assert float(module.weight.grad) == 60000


CHECKS: tuple[Check, ...] = (
    same_gradients,
    weights_of_rank_0,
    other_modules,
    unused_parameters,
    no_parameter_reached,
    accumulation,
    several_passes,
    frozen_and_unfrozen,
    past_the_wrapper,
    counts,
    gradients_that_are_held,
    gradients_of_inputs,
    recomputation,
    half_precision,
)
