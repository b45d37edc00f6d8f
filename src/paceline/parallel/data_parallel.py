"""Data parallelism in one process: the rows of every call are dealt out to replicas of the module."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.contents import find_value
from paceline.errors import UsageError
from paceline.job import BufferRule
from paceline.parallel.arguments import Origin, Part, cut, sum_origins
from paceline.parallel.outputs import Column, Joining
from paceline.parallel.replicas import Replicas
from paceline.parallel.wrapper import Wrapper
from paceline.worker.replica import check_initialised
from paceline.worker.running import available_cores

IGNORE_INDEX = -100  # what torch's cross_entropy and Hugging Face's models leave out of a mean


class DataParallel(Wrapper):
    """Runs `module` on several devices of this process: cuts the rows of a call, joins the outputs, adds up the gradients.

    A call takes and returns what the module does, so any loss can be made of the whole output. The replicas' forwards run side by
    side in threads, and so do their backwards, within the caller's `backward`; afterwards every parameter's `grad` is that of all
    rows, and hooks on parameters have seen it once. On CPUs the replicas share the weights' memory.

    - Outputs are joined along dimension 0. One without dimensions, such as a loss that the module computes, becomes the mean
      weighted by rows, or by `count` where given.
    - Random masks follow `torch.manual_seed`: each call that draws takes one number from torch's generator. They are other masks
      than the bare module draws, and differ with the number of devices.
    - BatchNorm normalises each replica's rows by themselves; the running statistics take in all replicas, in order. Other buffers
      that the forward changes need a rule in `buffers`.
    - Python attributes that the forward sets stay in the replicas, save numbers, strings and None on which all agree.
    - A second derivative (`create_graph=True`) is refused.

    Args:
        module: the module; the user goes on to own it, and its optimizer may be made before or after.
        devices: one for each replica, such as `["cpu", "cpu"]`; None takes all GPUs, or one CPU replica per core.
        split: path of an argument -> dimension of its rows, or None to give it whole to every replica; positional arguments are
            called `0`, `1` and so on.
        count: function of one replica's arguments, as a dict, by which outputs without dimensions are weighted.
        buffers: name of a buffer -> how to merge what the replicas left in it, as for a `Job`.

    Raises:
        UsageError: there is no device, or the module cannot be used as it is.

    >>> model = DataParallel(nn.Linear(3, 1), devices=["cpu", "cpu"])
    >>> model(torch.ones(5, 3)).square().mean().backward()
    >>> model.weight.grad.shape, list(model.state_dict())
    (torch.Size([1, 3]), ['weight', 'bias'])
    >>> model.close()
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[str | torch.device] | None = None,
        *,
        split: Mapping[str, int | None] | None = None,
        count: Callable[[Any], Any] | None = None,
        buffers: Mapping[str, BufferRule] | None = None,
    ) -> None:
        super().__init__(module)
        check_initialised(module)
        self.devices = _devices(devices)
        self._split, self._count, self._rules = dict(split or {}), count, dict(buffers or {})
        self._replicas: Replicas | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module on the rows of all tensors among the arguments, dealt out to the devices.

        Raises:
            UsageError: the arguments cannot be cut, or the outputs not joined.
        """
        parts = cut(args, kwargs, len(self.devices), self._split)
        replicas = self._current_replicas()
        with replicas.turns:
            outputs = replicas.forward(self.module, parts)
        weights = [float(part.rows if self._count is None else self._count(part.arguments)) for part in parts]
        home = next((tensor.device for tensor in itertools.chain(self.module.parameters(), self.module.buffers())), None)
        joining = Joining([part.rows for part in parts], weights, home)
        joined = joining.join(outputs)
        columns = [column for column in joining.columns if column.differentiable]
        self._check_weights(parts, columns)
        if columns:
            _attach(_Backward(replicas, self.module, parts, columns))
        return joined

    def _current_replicas(self) -> Replicas:
        """Return the replicas, new ones where the module is no longer what they were copied from."""
        if self._replicas is None or not self._replicas.still_copies_of(self.module):
            self._replicas = Replicas(self.module, self.devices, self._rules)
        return self._replicas

    def _check_weights(self, parts: Sequence[Part], columns: Sequence[Column]) -> None:
        if len(parts) < 2 or self._count is not None or not any(column.weights for column in columns):
            return
        for part in parts:
            ignored = find_value(part.arguments, IGNORE_INDEX)
            if ignored is not None:
                raise UsageError(
                    f"the argument {ignored} holds {IGNORE_INDEX}, the index that losses ignore, and the module returns a loss: "
                    "replicas with fewer labels would weigh too much. Pass DataParallel(count=count_valid(...)), "
                    "or compute the loss of the output"
                )

    def close(self) -> None:
        """End the threads; a later call starts new ones. Outputs that still wait for their backward are lost."""
        if self._replicas is not None:
            self._replicas.threads.close()
            self._replicas = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replicas": None}

    def __repr__(self) -> str:
        return f"DataParallel({self.module!r}, devices={[str(device) for device in self.devices]})"


def _devices(devices: Sequence[str | torch.device] | None) -> list[torch.device]:
    if isinstance(devices, str) or (devices is not None and not devices):
        raise UsageError(f"devices={devices!r} is no list of devices; give one for each replica, such as ['cpu', 'cpu']")
    if devices is not None:
        return [torch.device(device) for device in devices]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")] * available_cores()


class _Backward:
    """What the backward of one call needs: whose leaves the replicas' graphs begin with, and how their outputs were joined."""

    def __init__(self, replicas: Replicas, module: nn.Module, parts: Sequence[Part], columns: Sequence[Column]) -> None:
        self.columns = list(columns)
        self._replicas: Replicas | None = replicas
        self._num_parts = len(parts)
        everyone = list(enumerate(module.named_parameters()))
        trainable = [(index, name, parameter) for index, (name, parameter) in everyone if parameter.requires_grad]
        leaves = [[replica.parameters[index] for replica in replicas.replicas[: len(parts)]] for index, _, _ in trainable]
        reached = self._reached() if any(_has_hooks(parameter) for _, _, parameter in trainable) else None
        # Autograd would call the hooks of an unused parameter with None.
        used = [k for k, of in enumerate(leaves) if reached is None or any(id(leaf) in reached for leaf in of)]
        self._names = [trainable[k][1] for k in used]
        self.parameters = [trainable[k][2] for k in used]
        self._of_parameters = [leaves[k] for k in used]
        self._versions = [parameter._version for parameter in self.parameters]
        origins = [origin for part in parts for origin in part.origins]
        self.sources = list({id(origin.source): origin.source for origin in origins}.values())
        self._of_sources: list[list[Origin]] = [[o for o in origins if o.source is source] for source in self.sources]

    def _reached(self) -> set[int]:
        """Return the ids of all leaves that the outputs depend on."""
        open_ = [part.grad_fn for column in self.columns for part in column.parts.values() if part.grad_fn is not None]
        seen, reached = set(open_), {id(part) for column in self.columns for part in column.parts.values()}
        while open_:
            node: Any = open_.pop()
            if hasattr(node, "variable"):
                reached.add(id(node.variable))
            following = [after for after, _ in node.next_functions if after is not None and after not in seen]
            seen.update(following)
            open_ += following
        return reached

    def run(self, gradients: Sequence[Tensor | None], *, keep_graph: bool) -> list[Tensor | None]:
        """Return the gradients of parameters and inputs, given those of the joined outputs."""
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True asks for derivatives of DataParallel's gradients, which it does not have; "
                "differentiate twice through the bare module, model.module, or leave create_graph out"
            )
        if self._replicas is None:
            raise RuntimeError("Trying to backward through the graph a second time: pass retain_graph=True to the first backward")
        for name, parameter, version in zip(self._names, self.parameters, self._versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(
                    f"the parameter {name!r} has been modified by an inplace operation between a call of DataParallel and its "
                    "backward, which would give gradients at neither value; step the optimizer after all backwards"
                )
        given = [(column, gradient) for column, gradient in zip(self.columns, gradients, strict=True) if gradient is not None]
        outputs: list[list[Tensor]] = [[] for _ in range(self._num_parts)]
        seeds: list[list[Tensor]] = [[] for _ in range(self._num_parts)]
        for column, gradient in given:
            for index, part in column.parts.items():
                if part.requires_grad:
                    outputs[index].append(part)
                    seeds[index].append(column.gradient_of(index, gradient))
        with self._replicas.turns:
            try:
                self._replicas.backward(outputs, seeds, keep_graph=keep_graph)
                return self._collect()
            finally:
                for leaf in itertools.chain(*self._of_parameters):
                    leaf.grad = None
                if not keep_graph:
                    self._let_go()

    def _collect(self) -> list[Tensor | None]:
        sums: list[Tensor | None] = [leaves[0].grad for leaves in self._of_parameters]
        for replica in range(1, self._num_parts):
            into, other = [], []
            for index, leaves in enumerate(self._of_parameters):
                gradient, so_far = leaves[replica].grad, sums[index]
                if gradient is None:
                    continue
                gradient = gradient.to(self.parameters[index].device)
                if so_far is None:
                    sums[index] = gradient
                elif so_far.layout == gradient.layout == torch.strided:
                    into.append(so_far)
                    other.append(gradient)
                else:
                    sums[index] = so_far + gradient
            if into:
                torch._foreach_add_(into, other)
        of_sources = []
        for source, origins in zip(self.sources, self._of_sources, strict=True):
            of_sources.append(sum_origins(source, origins, [origin.leaf.grad for origin in origins]))
            for origin in origins:
                origin.leaf.grad = None
        return sums + of_sources

    def _let_go(self) -> None:
        """Free the replicas' graphs, as autograd frees its own; the caller's loss may live on."""
        self._replicas = None
        for column in self.columns:
            column.parts = {}


def _has_hooks(parameter: Any) -> bool:
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _attach(backward: _Backward) -> None:
    """Make the joined outputs depend on the caller's parameters and inputs, with the replicas' backwards in between."""
    inputs: list[Tensor] = [*backward.parameters, *backward.sources]
    # Only tensors from outside of the module may require gradients: the replicas' graphs reach them by themselves.
    joined = tuple(column.joined for column in backward.columns)
    for column in backward.columns:
        del column.joined  # it is about to hold the node, which holds the column
    _Node.apply(backward, joined, *(inputs or [torch.zeros((), requires_grad=True)]))  # type: ignore[no-untyped-call]


class _Node(torch.autograd.Function):
    """All replicas' graphs as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, backward: _Backward, joined: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.num_inputs = backward, len(inputs)
        ctx.set_materialize_grads(False)
        return joined  # the very tensors that stand in the output already: autograd makes them the node's

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        results = ctx.run.run(gradients, keep_graph=keep_graph)
        return None, None, *results, *([None] * (ctx.num_inputs - len(results)))
