"""Torch's DistributedDataParallel, and beside it the same training by a Trainer: the weights agree to rounding.

python examples/coming_from/from_torch_ddp.py
torchrun --nproc-per-node 2 examples/coming_from/from_torch_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline import Job, Trainer

EPOCHS, ROWS_PER_STEP = 3, 16
numbers = torch.Generator().manual_seed(0)
rows = TensorDataset(torch.randn(64, 8, generator=numbers), torch.randint(0, 3, (64,), generator=numbers))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def theirs() -> nn.Module:
    """Sizes are per process, and the sampler deals the rows out."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(rows, shuffle=False)
    loader = DataLoader(rows, batch_size=ROWS_PER_STEP // dist.get_world_size(), sampler=sampler)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.module


job = Job(
    model=make_model(),
    loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    data=DataLoader(rows, batch_size=ROWS_PER_STEP, shuffle=False),  # the global batch
)

alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
expected = theirs()
with Trainer(job) as trainer:  # takes the processes that there are
    for batch in trainer.batches(epochs=EPOCHS):
        report = trainer.step(batch)
    pairs = zip(trainer.model.parameters(), expected.parameters(), strict=True)
    difference = max(float((ours - other).detach().abs().max()) for ours, other in pairs)
    if trainer.is_main:
        print(f"step {report.step}, workers {trainer.size}, largest difference of a weight {difference:.9f}")
dist.destroy_process_group()
