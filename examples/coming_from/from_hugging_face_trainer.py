"""What TrainingArguments say, said as a job: decay for some weights, warm-up, the best model at the end, a folder to load.

python examples/coming_from/from_hugging_face_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from paceline import Best, Checkpoints, Job, Trainer, count_valid, export_weights

PAD, IGNORED = 0, -100
ROWS = [[(start + step * i) % 15 + 1 for i in range(6 + start % 4)] for start in range(15) for step in (1, 2)]


def model() -> GPT2LMHeadModel:
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), PAD)
    sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, loss_type="ForCausalLM"))


def collate(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    length = max(map(len, samples))
    labels = torch.tensor([row + [IGNORED] * (length - len(row)) for row in samples])
    return {"input_ids": labels.clamp(min=PAD), "attention_mask": (labels != IGNORED).long(), "labels": labels}


def optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    decayed, plain = ([pair for pair in named if (pair[1].ndim > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)


job = Job(
    model=model,
    loss=lambda m, batch: m(**batch).loss,
    count=count_valid("labels", shift=1),
    optimizer=optimizer,
    scheduler=lambda optimizer, total_steps: get_linear_schedule_with_warmup(optimizer, 3, total_steps),
    data=ROWS,
    held_out=ROWS,
    collate=collate,
    batch_size=8,  # per_device_train_batch_size=2 x gradient_accumulation_steps=2 x 2 devices
    micro_batches=4,
    clip_norm=1.0,  # max_grad_norm
    epochs=8,  # num_train_epochs
)

with tempfile.TemporaryDirectory() as folder, Trainer(job, "replicas=2") as trainer:
    before = trainer.evaluate()
    trainer.fit(checkpoints=folder, save_every=10, keep=2, evaluate_every=5, best=Best(metric="loss", patience=3))
    trainer.load(Checkpoints(folder).best())  # load_best_model_at_end
    after = trainer.evaluate()
    export_weights(trainer.model.state_dict(), Path(folder) / "model", model())
    opened = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
    ids = torch.tensor([ROWS[0]])
    same = torch.equal(opened(ids).logits, trainer.model.eval()(ids).logits)
    print(f"loss {before.loss:.4f} -> {after.loss:.4f} at step {trainer.steps_done}; from_pretrained, same logits: {same}")
