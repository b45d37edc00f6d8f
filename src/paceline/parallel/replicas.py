"""Copies of one module in threads: kept like the module, run forward side by side, what they changed in it brought back."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.contents import to_device
from paceline.errors import UsageError
from paceline.job import BufferRule
from paceline.parallel.arguments import Part
from paceline.parallel.threads import ReplicaThreads
from paceline.random_streams import stream_seed
from paceline.transport.threads import ThreadsTransport
from paceline.worker.masks import SharedDraws, ThreadMasks
from paceline.worker.module_state import ModuleState, folds
from paceline.worker.replica import mirror, replicate
from paceline.worker.running import available_cores
from paceline.worker.thread import in_callers_modes

FORWARD_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Replica:
    """One copy of the module, on its device."""

    def __init__(self, source: nn.Module, device: torch.device, shared: SharedDraws) -> None:
        self.device = device
        self.module = replicate(source, device, parameter_hooks=False)
        for original, copied in zip(source.modules(), self.module.modules(), strict=True):
            # The user's hooks themselves, not copies of what they are bound to: who listens to the module hears its replicas.
            vars(copied).update({name: vars(original)[name] for name in FORWARD_HOOKS})
        self.masks = ThreadMasks(shared)
        self.parameters = list(self.module.parameters())
        self._marks: dict[str, tuple[int, int]] = {}
        self._weights: list[int] = []

    @torch.no_grad()
    def follow(self, source: nn.Module, caches: Collection[str]) -> None:
        """Take over what the user, or an earlier call, has changed in the module since; of `caches` it keeps its own."""
        mirror(source, self.module, parameter_hooks=False)
        originals = list(source.parameters())
        apart = [(p, q) for p, q in zip(originals, self.parameters, strict=True) if p.data_ptr() != q.data_ptr() and p.numel()]
        versions = [original._version for original, _ in apart]
        if apart and versions != self._weights:
            for original, copied in apart:
                copied.data.copy_(original.data)
            self._weights = versions
        for name, buffer in source.named_buffers():
            own = self.module.get_buffer(name)
            # Only what is not equal already: a graph of an earlier call may hold the buffer.
            if self._marks.get(name) != _mark(buffer, own) and not (name in caches and name in self._marks):
                _assign(self.module, name, buffer.detach().to(self.device, copy=True))
                self._marks[name] = _mark(buffer, self.module.get_buffer(name))

    def marked(self, source: nn.Module) -> None:
        """Note that the buffers are equal to the user's now."""
        own = dict(self.module.named_buffers())
        self._marks = {name: _mark(buffer, own[name]) for name, buffer in source.named_buffers() if name in own}

    def fresh_statistics(self) -> None:
        """Give BatchNorms that will move their statistics new tensors for them: graphs of earlier calls hold the old ones."""
        for norm in self.module.modules():
            if folds(norm) and norm.training:
                for name, buffer in norm.named_buffers(recurse=False):
                    setattr(norm, name, buffer.clone())


class Replicas:
    """Replicas of `source` on `devices`, one thread each. Outputs that wait for their backward keep it alive."""

    def __init__(self, source: nn.Module, devices: Sequence[torch.device], rules: Mapping[str, BufferRule]) -> None:
        self.devices = list(devices)
        self.shared = SharedDraws()
        self.replicas = [Replica(source, device, self.shared) for device in devices]
        self.transports = ThreadsTransport.group(len(devices))
        self.threads = ReplicaThreads(len(devices), max(1, available_cores() // len(devices)))
        self.turns = threading.RLock()
        self._rules = rules
        self._caches = {name for name, rule in rules.items() if rule == "cache"}
        self._made_of = _make_up(source)
        self._states: list[ModuleState] = []

    @property
    def on_cpu(self) -> bool:
        """Whether the replicas' backwards run in their own threads; a GPU's run in the one that torch has for it."""
        return all(device.type == "cpu" for device in self.devices)

    def still_copies_of(self, source: nn.Module) -> bool:
        """Say whether the module is still made of the tensors and modules that the replicas were copied from."""
        return self.threads.open and self._made_of == _make_up(source)

    def forward(self, source: nn.Module, parts: Sequence[Part]) -> list[Any]:
        """Run every part through its replica and return the outputs; statistics and attributes are written back to `source`."""
        self.shared.mark()
        seed = _seed_of_next_draws()
        norms = any(folds(module) and module.training for module in source.modules())
        self._states = []
        for replica, transport in zip(self.replicas, self.transports, strict=True):
            replica.follow(source, self._caches)
            if norms:
                replica.fresh_statistics()
            self._states.append(ModuleState(replica.module, self._rules, transport, global_norms=False))
            self._states[-1].begin()
        calls: list[Callable[[], Any] | None] = [
            in_callers_modes(functools.partial(self._forward, index, part, stream_seed("replica", seed, index)))
            for index, part in enumerate(parts)
        ]
        outputs = self.threads.run(calls + [None] * (len(self.replicas) - len(parts)))
        self.shared.check()
        if any(replica.masks.drawn or replica.device.type != "cpu" for replica in self.replicas[: len(parts)]):
            torch.empty((), dtype=torch.int64).random_()  # the next call draws other numbers; one that drew none leaves no trace
        self._bring_back(source, len(parts), norms)
        return outputs[: len(parts)]

    def _forward(self, index: int, part: Part, seed: int) -> Any:
        replica, state = self.replicas[index], self._states[index]
        with torch.no_grad():
            state.before_forward()
        try:
            with replica.masks.use(seed, replica.device), _current(replica.device):
                args, kwargs = to_device(part.args, replica.device), to_device(part.kwargs, replica.device)
                return replica.module(*args, **kwargs)
        except Exception as error:
            error.add_note(f"replica {index} of {len(self.replicas)} on {replica.device}, {part} of the call")
            raise
        finally:
            with torch.no_grad():
                state.after_backward(index)

    @torch.no_grad()
    def _bring_back(self, source: nn.Module, active: int, norms: bool) -> None:
        states = self._states[:active]
        attributes = [state.changed_attributes() for state in states]
        changed = sorted({name for state in states for name in state.changed()})
        try:
            states[0].check(changed, attributes)
        except UsageError as error:
            error.add_note("for DataParallel: buffers= is an argument of the wrapper; one device alone changes nothing of this")
            raise
        for name, value in attributes[0].items():
            module, _, key = name.rpartition(".")
            setattr(source.get_submodule(module), key, value)
        if norms or self._rules:
            for replica in self.replicas:  # what is folded now must not reach into the graphs of this call
                replica.fresh_statistics()
            finish: list[Callable[[], None] | None] = [state.finish for state in self._states]
            self.threads.run(finish)
            merged = dict(self.replicas[0].module.named_buffers())
            for name, buffer in source.named_buffers():
                if name not in self._caches and not torch.equal(buffer, merged[name].to(buffer.device)):
                    buffer.copy_(merged[name])
            for replica in self.replicas:
                replica.marked(source)

    def backward(self, outputs: Sequence[Sequence[Tensor]], seeds: Sequence[Sequence[Tensor]], *, keep_graph: bool) -> None:
        """Run each replica's own backward: in its thread, and at once. Gradients are left in the leaves' `grad`."""
        if not self.on_cpu:
            # The thread that runs a GPU's backward is the one that waits here: it takes all replicas' as one within its own.
            flat, flat_seeds = [o for one in outputs for o in one], [s for one in seeds for s in one]
            torch.autograd.backward(flat, flat_seeds, retain_graph=keep_graph)
            return

        def run(index: int) -> None:
            replica = self.replicas[index]
            try:
                with replica.masks.use(0, replica.device):
                    replica.masks.backward_of(outputs[index], seeds[index], keep_graph=keep_graph)
            except Exception as error:
                error.add_note(f"replica {index} of {len(self.replicas)} on {replica.device}, backward")
                raise

        calls: list[Callable[[], None] | None] = [functools.partial(run, i) if given else None for i, given in enumerate(outputs)]
        state = torch.get_rng_state()
        try:
            self.threads.run(calls + [None] * (len(self.replicas) - len(calls)))
        finally:
            # torch.utils.checkpoint puts old states of the process's generator back, and threads that do so cross each other.
            if not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device` is the thread's current one, where devices are counted."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _mark(buffer: Tensor, own: Tensor) -> tuple[int, int]:
    return hash((id(buffer), _version(buffer))), hash((id(own), _version(own)))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, key = name.rpartition(".")
    module.get_submodule(path)._buffers[key] = value


def _make_up(source: nn.Module) -> list[Any]:
    """Return what a copy of the module is right for: its modules, their forwards, its parameters' memory, its buffers' shapes."""
    modules = [(type(module), id(vars(module).get("forward"))) for module in source.modules()]
    weights = [(id(p), p.data_ptr(), p.shape, p.dtype, p.device) for p in source.parameters()]
    buffers = [(name, buffer.shape, buffer.dtype, buffer.device) for name, buffer in source.named_buffers()]
    return [modules, weights, buffers]


def _seed_of_next_draws() -> int:
    """Return a number that the caller's generator determines, without drawing from it."""
    state = torch.get_rng_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1
