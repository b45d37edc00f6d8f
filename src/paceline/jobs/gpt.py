"""Job `gpt`: a byte-level GPT on the source code of the Python standard library. The model is plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset

from paceline.job import Job, Named
from paceline.jobs.source_text import Windows, read_source_text

CONTEXT = 128
HELD_OUT_WINDOWS = 512
LR = 2e-3
WARMUP_STEPS = 40


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [rows, heads, length, width / heads]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x)))
        mixed: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return mixed


class ByteGPT(nn.Module):
    """Byte ids, int64[rows, length], to logits of the byte after each, float[rows, length, 256]; length is at most `context`."""

    def __init__(self, *, width: int = 256, depth: int = 4, heads: int = 4, context: int = CONTEXT, dropout: float = 0.05) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight
        self._initialise(width, depth)

    @torch.no_grad()
    def _initialise(self, width: int, depth: int) -> None:
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                # The branches that add into the residual stream start smaller, so that its variance does not grow with depth.
                adds_to_stream = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1] * (2 * depth if adds_to_stream else 1)))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.embed.weight, std=0.02)
        # Waves of many lengths, which training then changes: attention finds neighbours from the first step on.
        angles = torch.arange(self.context)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
        self.position.weight.copy_(0.02 * torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        # As small as the head needs the shared weight, as large as the residual stream needs its input.
        x = self.dropout((self.embed(ids) + self.position(positions)) * math.sqrt(self.embed.embedding_dim))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    ids, following = batch
    return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def optimizer(named: Named) -> Optimizer:
    """Return AdamW that decays matrices but neither biases nor norms."""
    decayed = [(name, parameter) for name, parameter in named if parameter.dim() >= 2]
    others = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)


def scheduler(of: Optimizer, total_steps: int) -> LambdaLR:
    """Return a linear warm-up followed by a cosine down to a tenth."""
    warmup = min(WARMUP_STEPS, max(1, total_steps // 5))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return LambdaLR(of, factor)


@torch.no_grad()
def sample(model: nn.Module, prompt: str = "\ndef ", length: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
    """Return text that the model writes after a prompt; draws from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        ids = torch.tensor([list(prompt.encode())])
        for _ in range(length):
            logits = model(ids[:, -CONTEXT:].to(device))[0, -1].float().cpu()
            following = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
            ids = torch.cat([ids, following[None]], dim=1)
    finally:
        model.train(was_training)
    text = bytes(ids[0].tolist()).decode(errors="replace").strip("\n")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def job() -> Job:
    """Return the job: about two minutes with two workers on two cores."""
    train, held_out = read_source_text()
    windows = Windows(held_out, CONTEXT)
    # Spread over all held-out files rather than taken from the first few.
    spread = range(0, len(windows), max(1, len(windows) // HELD_OUT_WINDOWS))[:HELD_OUT_WINDOWS]
    return Job(
        name="gpt",
        model=ByteGPT,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        data=Windows(train, CONTEXT),
        held_out=Subset(windows, spread),
        batch_size=8,
        clip_norm=1.0,
        steps=600,
        sample=sample,
    )
