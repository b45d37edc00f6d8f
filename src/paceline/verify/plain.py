"""The loop that a PyTorch user would write on one device, without the engine: what the engine itself is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.job import Job, takes_total_steps
from paceline.verify.records import StepRecord, smallest_eps, snapshot


def plain_loop(job: Job, model: nn.Module, batches: Iterable[list[Any]], total_steps: int) -> Iterator[StepRecord]:
    """Train `model` and yield what each step did. A batch is a list of pieces: the whole of it, or its micro-batches.

    With one piece a step is `loss.backward()` and `optimizer.step()`; with several it is the mean over all of them.
    """
    named = list(model.named_parameters())
    optimizers: dict[str, Optimizer] = {}
    schedulers: dict[str, Any] = {}
    for name, make in job.optimizers.items():
        optimizers[name] = make if isinstance(make, Optimizer) else make(named)
        make_scheduler = job.scheduler_of(name)
        if make_scheduler is not None:
            arguments = (optimizers[name], total_steps) if takes_total_steps(make_scheduler) else (optimizers[name],)
            schedulers[name] = make_scheduler(*arguments)
    for step, pieces in enumerate(batches, start=1):
        losses: dict[str, float] = {}
        lrs: dict[str, float] = {}
        gradients: dict[str, Tensor] = {}
        for name, loss in job.losses.items():
            optimizer = optimizers[name]
            model.zero_grad(set_to_none=True)
            losses[name] = _backward(job, loss, model, pieces)
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, job.clip_norm)
            lrs[name] = float(optimizer.param_groups[0]["lr"])
            optimizer.step()
            held = {id(parameter) for parameter in trained}
            gradients |= {f"gradient/{key}": p.grad.clone() for key, p in named if p.grad is not None and id(p) in held}
            if name in schedulers and job.scheduler_every == "step":
                schedulers[name].step()
        tensors = {key: tensor for key, tensor in snapshot(model).items() if not key.startswith("gradient/")}
        yield StepRecord(step, losses, lrs, gradients | tensors, smallest_eps(optimizers.values()))


def _backward(job: Job, loss: Callable[..., Any], model: nn.Module, pieces: list[Any]) -> float:
    """Leave the gradients of the mean loss over all pieces, and return that mean."""
    sums: list[Tensor] = []
    counts: list[float] = []
    for piece in pieces:
        result = loss(model, piece)
        parts = result if isinstance(result, tuple) else (result,)
        if len(parts) > 1 and not isinstance(parts[1], Mapping):
            value, count = parts[0], float(parts[1])
        else:
            count = float(_rows(piece) if job.count is None else job.count(piece))
            value = parts[0] * count if count else parts[0].new_zeros(())
        sums.append(value)
        counts.append(count)
    total = sum(counts)
    mean = torch.stack([value.reshape(()) for value in sums]).sum() / total
    torch.autograd.backward(mean)
    return float(mean.detach())


def _rows(piece: Any) -> int:
    if isinstance(piece, Tensor):
        return piece.shape[0]
    values = piece.values() if isinstance(piece, Mapping) else piece if isinstance(piece, list | tuple) else vars(piece).values()
    return next(value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim)


class NoMasks(TorchFunctionMode):
    """Turns every dropout off, in modules and functions alike, so that a whole batch and its micro-batches can be compared."""

    SAME = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.SAME:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func is F.multi_head_attention_forward:
            args = (*args[:9], 0.0, *args[10:])
        return func(*args, **kwargs)
