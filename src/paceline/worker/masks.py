"""Random numbers inside a forward: a stream per micro-batch, also where several workers share one process.

torch has one default generator per process, so worker threads must not seed it. Each has a generator of its own, and a
function mode hands it to whatever draws: the numbers are those that the seeded default generator would have given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import UsageError
from paceline.random_streams import use_random_stream

# Functions written in Python that draw inside; the mode sees only the call itself, not what it calls.
DRAWING_IN_PYTHON: frozenset[Callable[..., Any]] = frozenset(
    {
        F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
        F.rrelu, F.gumbel_softmax, F.multi_head_attention_forward,
        F.fractional_max_pool2d, F.fractional_max_pool3d,
        *(function for function in vars(nn.init).values() if inspect.isfunction(function)),
    }
)  # fmt: skip
# Names of built-in functions and methods that draw without saying so in their operator's tags.
DRAWING_COMPOSITES = (
    "scaled_dot_product_attention", "dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_",
    "feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout", "lstm", "gru", "rnn_tanh", "rnn_relu", "rrelu", "rrelu_",
)  # fmt: skip


@functools.cache
def _drawing_names() -> frozenset[str]:
    """Return the names of all operators that torch itself marks as drawing from a seeded generator, and of composites of them."""
    names = set(DRAWING_COMPOSITES)
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "aten":
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
                names.add(base)
    return frozenset(names)


@functools.cache
def _with_generator(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload of a drawing operator that takes a generator, or None."""
    names = sorted(argument.name for argument in operator._schema.arguments)
    if "generator" in names:
        return operator
    for overload in operator.overloadpacket.overloads():
        candidate: torch._ops.OpOverload = getattr(operator.overloadpacket, overload)
        if sorted(argument.name for argument in candidate._schema.arguments) == sorted([*names, "generator"]):
            return candidate
    return None


class _HandGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Gives `generator` to every CPU operator that draws and was given none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator
        self.refuses = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None and _on_cpu(args, kwargs):
            if _dropout_of(func, args, kwargs) == 0:  # fused attention is marked as drawing, and without dropout does not
                return func(*args, **kwargs)
            if self.refuses:
                raise UsageError(
                    "random numbers are drawn again during backward (torch.utils.checkpoint around dropout?), and worker threads "
                    "cannot replay them; run the workers as processes (transport='processes')"
                )
            drawing = _with_generator(func)
            if drawing is None:
                raise UsageError(
                    f"{func} draws random numbers from the process's only generator, which worker threads share; "
                    "run the workers as processes (transport='processes'), or draw in another way"
                )
            return drawing(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def _dropout_of(func: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> float | None:
    """Return the dropout probability that an operator was called with; None where it has none."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return None if given is None else float(given)
    return None


def _on_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    first = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
    return first is None or first.device.type == "cpu"


class SharedDraws:
    """The generators that a process has only one of; what worker threads drew from them, and which of them, would be chance."""

    def __init__(self) -> None:
        self._before = self._states()

    def mark(self) -> None:
        """Remember the states while no worker runs."""
        self._before = self._states()

    def check(self) -> None:
        """Raise `UsageError` where a worker has drawn since the mark."""
        for name, state in self._states().items():
            if state != self._before[name]:
                raise UsageError(
                    f"the model draws from {name}'s generator, which worker threads share: draws would depend on the layout; "
                    "run the workers as processes (transport='processes'), or draw with torch functions"
                )

    @staticmethod
    def _states() -> dict[str, object]:
        name, keys, position, *_ = np.random.get_state()
        return {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": (name, bytes(np.asarray(keys).data), position),
            "Python": random.getstate(),
        }


class ThreadMasks(TorchFunctionMode):
    """Draws of one worker thread; `use` puts a stream in place for the forward and backward of one micro-batch."""

    def __init__(self, shared: SharedDraws) -> None:
        super().__init__()
        self._shared = shared
        self._hand = _HandGenerator(torch.Generator())
        self._drawing = _drawing_names()
        self._seeded = torch.Tensor()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in self._drawing and func not in DRAWING_IN_PYTHON:
            return func(*args, **kwargs)
        if func is F.dropout and not self._hand.refuses:
            return self._dropout(*args, **kwargs)
        with self._hand:
            return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Do what torch's dropout does, operator by operator; it is the commonest draw, and a dispatch mode is slow."""
        if not training or not 0 < p < 1 or not input.numel() or input.device.type != "cpu":
            with self._hand:
                return F.dropout(input, p, training, inplace)
        noise = torch.empty_like(input).bernoulli_(1 - p, generator=self._hand.generator).div_(1 - p)
        return input.mul_(noise) if inplace else input * noise

    @contextlib.contextmanager
    def use(self, seed: int, device: torch.device) -> Iterator[None]:
        self._seeded = self._hand.generator.manual_seed(seed).get_state()
        if device.type == "cuda":  # every GPU has a generator of its own already
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        with self:
            yield

    def check(self) -> None:
        """Raise `UsageError` where something was drawn that is nobody's stream. Once all workers have drawn."""
        self._shared.check()

    @property
    def drawn(self) -> bool:
        """Whether anything was drawn on the CPU since the stream was put in place."""
        return not torch.equal(self._hand.generator.get_state(), self._seeded)

    def backward(self, value: Tensor, seed: Tensor, inputs: Sequence[Tensor] | None) -> None:
        """Run the backward of `value`, in which nothing may be drawn on a CPU."""
        self.backward_of([value], [seed], inputs)

    def backward_of(
        self, values: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor] | None = None, *, keep_graph: bool = False
    ) -> None:
        """Run one backward of several values, in which nothing may be drawn on a CPU."""
        self._hand.refuses = True
        try:
            # torch.autograd.backward is itself a torch function, inside of which the mode would be off and see no recomputation.
            run = torch.autograd.graph._engine_run_backward
            run(tuple(values), tuple(seeds), keep_graph, False, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True)
        finally:
            self._hand.refuses = False


class ProcessMasks:
    """Draws of a worker that is alone in its process: torch, numpy and Python are seeded for it, and put back."""

    def use(self, seed: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return use_random_stream(seed, device)

    def backward(self, value: Tensor, seed: Tensor, inputs: Sequence[Tensor] | None) -> None:
        """Run the backward of `value`."""
        torch.autograd.backward([value], [seed], inputs=inputs)

    def check(self) -> None:
        """Nothing to check: every generator was seeded."""
