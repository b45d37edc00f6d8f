"""What to train: a frozen value made of plain things - a module, a loss, an optimizer, data - and checked when it is made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError

Named: TypeAlias = "list[tuple[str, nn.Parameter]]"
Loss: TypeAlias = Callable[[nn.Module, Any], Any]
MakeOptimizer: TypeAlias = "Optimizer | Callable[[Named], Optimizer]"
BufferRule: TypeAlias = "Literal['sum', 'mean', 'max', 'min', 'last', 'cache'] | Callable[[Tensor, list[Tensor]], Tensor]"

BUFFER_RULES = ("sum", "mean", "max", "min", "last", "cache")


@dataclass(frozen=True, kw_only=True, repr=False)
class Job:
    """A training job: the model, its loss, its optimizer and its data, without a word on how many workers share it.

    Args:
        model: a module, or a function that builds one (called with the job's random stream, so that every rank gets the same).
        loss: `loss(model, batch)` returns a mean (weighted by rows, or by `count(batch)`), or a sum with its count, or either
            with a dict of further scalars to report: `mean`, `(sum, count)`, `(mean, extras)`, `(sum, count, extras)`. A dict of
            named losses is taken in turn within a step, each with the optimizer of its name (a GAN).
        optimizer: a function of named parameters that returns a torch optimizer, or an optimizer over the given module.
        data: a map-style or iterable dataset, or a DataLoader, whose batch size is then the global one.
        batch_size: rows per optimizer step, over all workers together; None takes the DataLoader's.
        scheduler: `scheduler(optimizer)` or `scheduler(optimizer, total_steps)` returns a torch or Transformers LR scheduler.
        scheduler_every: `step` steps it after every optimizer step, `epoch` after every epoch.
        count: `count(batch)` is what a mean was taken over, for batches whose rows weigh differently (padding, ignored tokens).
        micro_batches: the default number of slices of a global batch that one forward sees each.
        clip_norm: largest norm of all gradients together; `math.inf` reports the norm without clipping; None does neither.
        split: for tensors of a batch that are not split along dimension 0, by dotted path: the dimension, or None for "not at all".
        buffers: what becomes of a buffer that a forward changes, by name: `sum`, `mean`, `max`, `min`, `last`, `cache` (each worker
            has its own), or `rule(before, values)` over the values that the micro-batches left. BatchNorm needs no rule.
        sync_batchnorm: normalise BatchNorm over the whole global batch; needs exactly one micro-batch per replica.
        held_out: data to evaluate on, taken whole and in order.
        predict: `predict(model, batch)` returns what metrics and `Trainer.predict` see; by default `model(x)` of an `(x, y)` batch.
        target: `target(batch)` returns what predictions are compared with; by default `y` of an `(x, y)` batch.
        metrics: by name, functions `metric(predictions, targets)` over all samples, or objects with `update`, `compute`, `reset`.
        sample: `sample(model)` returns text to show after training.
        weights: what to start from instead of the model's own initial weights: a `.safetensors` file, a checkpoint, the folder of
            a run, or a Hugging Face folder.
        epochs: how long to train by default, in passes over the data.
        steps: how long to train by default, in optimizer steps.
        seed: start of every random stream: weights, order of the data, augmentation, masks.
        shuffle: draw a new order for each epoch; None means yes, or what the DataLoader does.
        drop_last: leave out the last batch of an epoch where it is smaller; None means no, or what the DataLoader does.
        collate: makes a micro-batch from a list of samples; None means the DataLoader's, or torch's default.
        num_workers: loader processes of each process; None means none, or what the DataLoader does.
        pin_memory: load into pinned memory; None means where a GPU is used, or what the DataLoader does.
        intra_op_threads: threads of each worker's operators; None divides the cores, or is 1 in reproducible mode.
        name: what run folders and messages call it.

    Raises:
        UsageError: a value has the wrong type or is out of range; the message says what is allowed.

    >>> model = nn.Linear(3, 1)
    >>> Job(model=model, loss=lambda m, b: (m(b[0]) - b[1]).square().mean(),
    ...     optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    ...     data=torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)), batch_size=4)
    Job('job', Linear of 4 parameters, batch_size=4)
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss | Mapping[str, Loss]
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer]
    data: Any = None
    batch_size: int | None = None
    scheduler: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    scheduler_every: Literal["step", "epoch"] = "step"
    count: Callable[[Any], int] | None = None
    micro_batches: int | None = None
    clip_norm: float | None = None
    split: Mapping[str, int | None] = field(default_factory=dict)
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    sync_batchnorm: bool = False
    held_out: Any = None
    predict: Callable[[nn.Module, Any], Any] | None = None
    target: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    sample: Callable[[nn.Module], str] | None = None
    weights: str | os.PathLike[str] | None = None
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    shuffle: bool | None = None
    drop_last: bool | None = None
    collate: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    intra_op_threads: int | None = None
    name: str = "job"

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise UsageError(f"model={self.model!r} is neither an nn.Module nor a function that builds one")
        for field_name in ("count", "predict", "target", "sample", "collate"):
            value = getattr(self, field_name)
            if value is not None and not callable(value):
                raise UsageError(f"{field_name}={value!r} is not a function")
        losses, optimizers = self.losses, self.optimizers
        if not losses:
            raise UsageError("loss={} names no loss; pass loss=lambda model, batch: ..., or a dict of at least one")
        for name, loss in losses.items():
            if not callable(loss):
                raise UsageError(f"loss{_of(name)}={loss!r} is not a function; pass loss=lambda model, batch: ...")
        if list(losses) != list(optimizers):
            raise UsageError(
                f"loss names {_names(losses)} and optimizer names {_names(optimizers)} differ; "
                "give every named loss the optimizer of its name, in the same order"
            )
        for name, optimizer in optimizers.items():
            self._check_optimizer(name, optimizer)
        for name, scheduler in (self.scheduler if isinstance(self.scheduler, Mapping) else {"loss": self.scheduler}).items():
            if scheduler is not None and not callable(scheduler):
                raise UsageError(f"scheduler{_of(name)}={scheduler!r} is not a function; pass scheduler=lambda optimizer: ...")
        if isinstance(self.scheduler, Mapping) and not set(self.scheduler) <= set(losses):
            raise UsageError(f"scheduler names {_names(self.scheduler)} are not among the losses {_names(losses)}; rename them")
        if self.scheduler_every not in ("step", "epoch"):
            raise UsageError(f"scheduler_every={self.scheduler_every!r} is neither 'step' nor 'epoch'")
        for field_name in ("batch_size", "micro_batches", "epochs", "steps", "intra_op_threads"):
            _check_whole(field_name, getattr(self, field_name), least=1)
        _check_whole("num_workers", self.num_workers, least=0)
        if not isinstance(self.seed, int):
            raise UsageError(f"seed={self.seed!r} is not a whole number")
        if self.clip_norm is not None and not (isinstance(self.clip_norm, int | float) and self.clip_norm > 0):
            raise UsageError(f"clip_norm={self.clip_norm!r} is not above 0; pass the largest norm, or math.inf to report it only")
        for buffer, rule in self.buffers.items():
            if not callable(rule) and rule not in BUFFER_RULES:
                allowed = ", ".join(BUFFER_RULES)
                raise UsageError(f"buffers[{buffer!r}]={rule!r} is not one of {allowed}, nor a function(before, values)")
        for metric_name, metric in self.metrics.items():
            if not callable(metric) and not (hasattr(metric, "update") and hasattr(metric, "compute")):
                raise UsageError(f"metrics[{metric_name!r}]={metric!r} is neither a function nor an object with update and compute")

    @property
    def losses(self) -> dict[str, Loss]:
        """The losses by name; a single one is called `loss`."""
        return dict(self.loss) if isinstance(self.loss, Mapping) else {"loss": self.loss}

    @property
    def optimizers(self) -> dict[str, MakeOptimizer]:
        """The optimizers by the name of their loss."""
        return dict(self.optimizer) if isinstance(self.optimizer, Mapping) else dict.fromkeys(self.losses, self.optimizer)

    def scheduler_of(self, name: str) -> Callable[..., Any] | None:
        """Return the function that makes the scheduler of the loss called `name`, or None."""
        return self.scheduler.get(name) if isinstance(self.scheduler, Mapping) else self.scheduler

    def _check_optimizer(self, name: str, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer):
            if not isinstance(self.model, nn.Module):
                raise UsageError(
                    f"optimizer{_of(name)} is an optimizer already, but model is a function that builds the module later; "
                    "pass optimizer=lambda named: ..., or the module itself"
                )
            check_owned(optimizer, self.model)
        elif not callable(optimizer) or isinstance(optimizer, type):
            raise UsageError(
                f"optimizer{_of(name)}={optimizer!r} is neither a torch optimizer nor a function of named parameters; "
                "pass for example optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)"
            )
        if len(self.losses) > 1 and not isinstance(self.optimizer, Mapping):
            raise UsageError(f"several losses {_names(self.losses)} share one optimizer; pass a dict with one for each name")

    def describe(self) -> dict[str, Any]:
        """Return what can be said of the job in plain values, for run folders: names, numbers, and functions by their names."""
        words: dict[str, Any] = {}
        for key, value in vars(self).items():
            if isinstance(value, bool | int | float | str):
                words[key] = value
            elif isinstance(value, Mapping) and value:
                words[key] = {str(k): v if isinstance(v, int | str) else _word(v) for k, v in value.items()}
            elif value is not None and not isinstance(value, Mapping):
                words[key] = _word(value)
        return words

    def __repr__(self) -> str:
        if isinstance(self.model, nn.Module):
            size = sum(parameter.numel() for parameter in self.model.parameters())
            model = f"{type(self.model).__name__} of {size:,} parameters"
        else:
            model = f"model from {_word(self.model)}"
        return f"Job({self.name!r}, {model}, batch_size={self.batch_size})"


def check_owned(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise `UsageError` where an optimizer holds a tensor that is not a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            f"the optimizer holds {len(foreign)} tensor(s) that are not parameters of the model, the first of shape {foreign[0]}; "
            "they would train apart on every worker. Register them in the model, or build the optimizer over model.parameters()"
        )


def takes_total_steps(make_scheduler: Callable[..., Any]) -> bool:
    """Return whether a scheduler function wants the number of steps as its second argument."""
    try:
        parameters = inspect.signature(make_scheduler).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) > 1 or "total_steps" in [p.name for p in parameters]


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"{name}={value!r} is not a whole number of at least {least}")


def _of(name: str) -> str:
    return "" if name == "loss" else f"[{name!r}]"


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


def _word(value: Any) -> str:
    """Return a name for a value without its address, so that equal jobs are described alike."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__
