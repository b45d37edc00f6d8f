"""The numbers of a DeepSpeed configuration as a job and a plan. What has no counterpart yet is refused here, not left out.

python examples/coming_from/from_deepspeed.py
"""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from paceline import Job, Plan, Trainer

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "zero_optimization": {"stage": 0},
}


def plan_of(config: dict[str, Any]) -> Plan:
    """Return the plan: rows of a step / rows of a forward micro-batches, of which each replica accumulates some."""
    if config.get("zero_optimization", {}).get("stage", 0) or any(config.get(k, {}).get("enabled") for k in ("fp16", "bf16")):
        raise ValueError("ZeRO, FP16 and BF16 are not there yet")
    micro_batches = config["train_batch_size"] // config["train_micro_batch_size_per_gpu"]
    return Plan(replicas=micro_batches // config["gradient_accumulation_steps"], micro_batches=micro_batches)


numbers = torch.Generator().manual_seed(0)
x = torch.randn(128, 6, generator=numbers)
job = Job(
    model=lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)),
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda named: torch.optim.AdamW(named, **CONFIG["optimizer"]["params"]),
    scheduler=lambda optimizer: LinearLR(optimizer, 0.01, 1.0, CONFIG["scheduler"]["params"]["warmup_num_steps"]),
    data=(x, x.sin().sum(dim=1, keepdim=True)),
    batch_size=CONFIG["train_batch_size"],
    clip_norm=CONFIG["gradient_clipping"],
)

with Trainer(job, plan_of(CONFIG)) as trainer:
    losses = [trainer.step(batch).loss for batch in trainer.batches(epochs=20)]
    print(f"{trainer.plan}: step {trainer.steps_done}, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
