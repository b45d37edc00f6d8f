"""What is saved and loaded: a model and its AdamW in the middle of a training."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.data_parallel.workloads import perceptron
from paceline.checkpoint import State, load_optimizer, optimizer_state, random_states, set_random_states
from paceline.jobs import gpt

LOSS = "loss"


@dataclass
class Subject:
    """A model and its optimizer, with state for every parameter."""

    model: nn.Module
    optimizer: Optimizer
    steps_done: int = 0

    def state(self) -> State:
        """Return all of it as Paceline saves it; the tensors are the living ones."""
        return State(
            weights=self.model.state_dict(),
            optimizers={LOSS: optimizer_state(self.optimizer, self.model.named_parameters())},
            random=random_states(),
            progress={"steps_done": self.steps_done},
        )

    def put_back(self, state: State) -> None:
        """Make model and optimizer what a state says."""
        self.model.load_state_dict(state.weights)
        load_optimizer(self.optimizer, self.model.named_parameters(), state.optimizers[LOSS])
        set_random_states(state.random)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of model and optimizer, in a fixed order; of tied weights each."""
        yield from self.model.state_dict().items()
        for name, parameter in self.model.named_parameters():
            yield from sorted((f"{name} {key}", entry) for key, entry in self.optimizer.state[parameter].items())

    def contents(self) -> Iterator[memoryview]:
        """Yield the bytes of every tensor, in memory where they are."""
        for _, tensor in self.tensors():
            array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(array)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors, tied ones once."""
        return sum({tensor.data_ptr(): tensor.nbytes for _, tensor in self.tensors()}.values())

    def wipe(self) -> None:
        """Set every tensor to zero, so that what stands in it later was loaded."""
        with torch.no_grad():
            for _, tensor in self.tensors():
                tensor.zero_()

    def fingerprint(self) -> int:
        """Return a number that tells whether every bit is the same."""
        crc = 0
        for content in self.contents():
            crc = zlib.crc32(content, crc)
        return crc


@dataclass(frozen=True)
class Kind:
    """A kind of subject: `words` describe it."""

    name: str
    words: str
    make: Callable[[], tuple[nn.Module, Optimizer]]

    def build(self, seed: int) -> Subject:
        """Return the subject after one update of random gradients, with the same bits for the same seed."""
        torch.manual_seed(seed)
        model, optimizer = self.make()
        # One parameter at a time: gradients of all would be memory that a save might use unseen.
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            parameter.grad = None
        return Subject(model, optimizer)


def _perceptron(widths: tuple[int, ...]) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = perceptron(widths)
        return model, AdamW(model.parameters())

    return make


def _gpt() -> tuple[nn.Module, Optimizer]:
    model = gpt.ByteGPT()
    return model, gpt.optimizer(list(model.named_parameters()))


_ALL = (
    Kind("mlp", "784 inputs, 8 hidden layers of 2048, 1000 classes, and its AdamW", _perceptron((784, *[2048] * 8, 1000))),
    Kind("gpt", "the model and the optimizer of the built-in job `gpt`", _gpt),
    Kind("tiny", "a perceptron that tests run, and its AdamW", _perceptron((8, 16, 4))),
)
KINDS = {kind.name: kind for kind in _ALL}
