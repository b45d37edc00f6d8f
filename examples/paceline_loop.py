"""Handwritten digits with two workers: the loop of plain_loop.py, and the same losses.

python examples/paceline_loop.py                              two threads
torchrun --nproc-per-node 2 examples/paceline_loop.py         two processes
"""

from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline import Job, Trainer

stored = np.load(files("paceline.jobs") / "digits.npz")
images = torch.from_numpy(stored["images"]).flatten(1).float() / 16
labels = torch.from_numpy(stored["labels"]).long()
train, held_out = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
job = Job(
    model=model,
    loss=lambda m, batch: cross_entropy(m(batch[0]), batch[1]),
    optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
    data=DataLoader(train, batch_size=50, shuffle=False),  # 50 rows per step, over both workers together
    held_out=held_out,
    metrics={"accuracy": lambda logits, y: (logits.argmax(1) == y).float().mean()},
)

with Trainer(job, "replicas=2,reproducible=true") as trainer:
    for epoch in range(4):
        for batch in trainer.batches(epochs=epoch + 1):
            report = trainer.step(batch)
        if trainer.is_main:
            print(f"epoch {epoch}: loss of the last batch {report.loss:.6f}")
    evaluation = trainer.evaluate()
    if trainer.is_main:
        print(f"held-out accuracy {evaluation['accuracy']:.4f}")
