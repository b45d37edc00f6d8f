"""A loop of one's own with an average of the weights, saved and gone on with under other workers: Fabric's save and load.

python examples/coming_from/from_lightning_fabric.py
"""

import tempfile

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Job, Trainer

numbers = torch.Generator().manual_seed(0)
x = torch.randn(96, 4, generator=numbers)
rows = TensorDataset(x, x.sum(dim=1, keepdim=True))


def make_job() -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1)),
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=DataLoader(rows, batch_size=16, shuffle=True),
        micro_batches=4,
        clip_norm=1.0,
    )


def train(plan: str, folder: str, epochs: int) -> tuple[nn.Module, AveragedModel]:
    """Go on from the folder's newest checkpoint, if there is one, to the end of so many epochs; save halfway and at the end."""
    average = AveragedModel(make_job().model(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with Trainer(make_job(), plan, objects={"average": average}) as trainer:
        found = trainer.resume(folder)
        if found is not None:
            print(f"went on after step {trainer.steps_done}, saved by other workers")
        for batch in trainer.batches(epochs=epochs):
            report = trainer.step(batch)
            average.update_parameters(trainer.model)
            if report.step % 8 == 0:
                trainer.save(folder)
        trainer.save(folder)
        return trainer.model, average


with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
    expected = train("replicas=1,reproducible=true", whole, epochs=5)
    train("replicas=2,reproducible=true", parts, epochs=2)
    resumed = train("replicas=4,reproducible=true", parts, epochs=5)
for name, one, other in zip(("weights", "average"), expected, resumed, strict=True):
    same = all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    print(f"{name}: {'the same bits' if same else 'different'}")
