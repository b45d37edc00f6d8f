"""A small GPT-2 of Hugging Face Transformers, built from a configuration, learns to add: scheduler, ignored labels, a metric.

python examples/hugging_face.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from paceline import Job, Trainer, count_valid

WORDS = "0123456789+="
PAD, IGNORED, ANSWER = len(WORDS), -100, 2  # ids of WORDS, then one for padding; answers have up to two digits


def encode(a: int, b: int) -> tuple[list[int], list[int]]:
    """Return ids and labels of a sum such as 3+4=7; the question has labels that the loss ignores."""
    question, answer = f"{a}+{b}=", f"{a + b}"
    ids = [WORDS.index(letter) for letter in question + answer]
    return ids, [IGNORED] * len(question) + ids[len(question) :]


def collate(samples: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to one length, so that evaluation can join the logits of all batches."""
    length = 4 + ANSWER
    rows = [(ids + [PAD] * (length - len(ids)), labels + [IGNORED] * (length - len(labels))) for ids, labels in samples]
    ids, labels = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of right digits; the logits at a position are of the next one."""
    counted = labels[:, 1:] != IGNORED
    return (logits[:, :-1].argmax(-1) == labels[:, 1:])[counted].float().mean()


def model() -> GPT2LMHeadModel:
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), PAD)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=PAD + 1, n_positions=16, n_embd=64, n_layer=2, n_head=4, loss_type="ForCausalLM", **ids)
    )


sums = [encode(a, b) for a in range(10) for b in range(10)]
job = Job(
    model=model,
    loss=lambda m, batch: m(**batch).loss,  # a mean over the labels that are not ignored ...
    count=count_valid("labels", shift=1),  # ... of which micro-batches have different numbers
    optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
    scheduler=lambda optimizer, total_steps: get_linear_schedule_with_warmup(optimizer, total_steps // 10, total_steps),
    data=sums,
    held_out=sums,
    collate=collate,
    predict=lambda m, batch: m(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits,
    target=lambda batch: batch["labels"],
    metrics={"accuracy": accuracy},
    batch_size=50,
    epochs=100,
    clip_norm=1.0,
)

with Trainer(job, "replicas=2,micro_batches=4") as trainer:
    before = trainer.evaluate()
    report = trainer.fit()
    after = trainer.evaluate()
    print(f"step {report.step}: loss {report.loss:.4f}, learning rate {report.lr:.2g}, gradient norm {report.grad_norm:.3f}")
    print(f"loss {before.loss:.4f} -> {after.loss:.4f}, accuracy {before['accuracy']:.4f} -> {after['accuracy']:.4f}")
