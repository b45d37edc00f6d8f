"""Two devices, 4 rows each, 2 accumulation steps, padded labels, a warm-up: what Accelerate's loop says in other words.

python examples/coming_from/from_accelerate.py
torchrun --nproc-per-node 2 examples/coming_from/from_accelerate.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

from paceline import Job, Trainer, count_valid

WORDS, IGNORED = 20, -100
numbers = torch.Generator().manual_seed(0)
SENTENCES = [torch.randint(0, WORDS, (length,), generator=numbers) for length in [3, 7, 5, 12, 4, 9, 6] * 7]  # 49


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad the rows of a micro-batch; the label of a word is the word itself, of padding none."""
    pad = nn.utils.rnn.pad_sequence
    return {"ids": pad(samples, batch_first=True), "labels": pad(samples, batch_first=True, padding_value=IGNORED)}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


job = Job(
    model=lambda: nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)),
    loss=loss,
    count=count_valid("labels"),  # a step's loss is the mean over all of its labels, wherever they lie
    optimizer=lambda named: torch.optim.AdamW(named, lr=2e-2),
    scheduler=lambda optimizer: LinearLR(optimizer, 0.1, 1.0, total_iters=4),  # in optimizer steps
    data=SENTENCES,
    held_out=SENTENCES,
    collate=collate,
    batch_size=4 * 2 * 2,  # 4 rows per device x 2 accumulation steps x 2 devices
    micro_batches=2 * 2,  # 2 accumulation steps x 2 devices
    clip_norm=1.0,
    epochs=5,
)

with Trainer(job, "replicas=2,reproducible=true") as trainer:
    before = trainer.evaluate()
    lrs = []
    for batch in trainer.batches():
        report = trainer.step(batch)
        lrs.append(round(report.lr, 4))
    after = trainer.evaluate()
    if trainer.is_main:
        print(f"step {report.step}: {report.rows} row in the last batch, learning rates {lrs[:6]}")
        print(f"held out, {after.rows} rows: loss {before.loss:.4f} -> {after.loss:.4f}")
