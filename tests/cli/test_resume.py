"""`--resume` in all its forms, and the commands that look at checkpoints and export weights, as a user types them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from paceline.checkpoint import Checkpoints, load_weights
from paceline.cli import main
from paceline.cli.resume import spell_out

JOBS = """
import torch
from torch import nn
from paceline.job import Job

DATA = torch.utils.data.TensorDataset(torch.arange(64.0)[:, None].repeat(1, 4) / 64, torch.arange(64.0))

def make(model, loss, **changes):
    return Job(model=model, loss=loss, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), data=DATA, batch_size=8,
               micro_batches=4, steps=12, **changes)

def square(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square().mean()

def job():
    held_out = torch.utils.data.TensorDataset(DATA.tensors[0][:16], DATA.tensors[1][:16])
    return make(lambda: nn.Linear(4, 1), square, held_out=held_out, metrics={"mean": lambda p, t: float(p.mean())})

def wider():
    return make(lambda: nn.Linear(4, 2), square)

def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ids = [torch.arange(10) + n for n in range(16)]
    return Job(model=lambda: GPT2LMHeadModel(config), data=ids, loss=lambda m, b: m(b, labels=b).loss, batch_size=4, steps=2,
               optimizer=lambda named: torch.optim.AdamW(named, lr=0.01))
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in a folder with jobs.py; returns status, output and errors."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(line: str) -> tuple[int, str, str]:
        status = main(line.split())
        return status, *capfd.readouterr()

    return run


def steps(path: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize(
    ("line", "spelled_out"),
    [
        ("train gpt --resume", "train gpt --resume=newest"),
        ("train --resume gpt --run r", "train --resume=newest gpt --run r"),
        ("train --resume path.py:job", "train --resume=newest path.py:job"),
        ("train gpt --resume --check", "train gpt --resume=newest --check"),
        ("train gpt --resume auto --run r", "train gpt --resume auto --run r"),
        ("train gpt --resume=runs/a", "train gpt --resume=runs/a"),
        ("train gpt --resume runs/a", "train gpt --resume runs/a"),
        ("train gpt --resume=newest", "train gpt --resume=newest"),
    ],
)
def test_resume_may_stand_alone(line: str, spelled_out: str) -> None:
    assert spell_out(line.split()) == spelled_out.split()


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own imports
def test_run_is_resumed_from_its_newest_checkpoint_or_another_or_started(run: Run, tmp_path: Path) -> None:
    train = "train jobs.py:job --save-every 4 --keep 9 --plan reproducible=true"
    assert run(f"{train} --run whole")[0] == 0

    status, out, _ = run(f"{train} --run r --steps 6 --resume auto")  # there is none yet
    assert status == 0
    assert "resume " not in out
    status, out, _ = run(f"{train},replicas=2 --transport threads --run r --resume")
    assert status == 0
    assert "resume     r/checkpoints/step-00000006, after step 6, in epoch 0\n" in out
    assert "saved under replicas=1,micro_batches=4,reproducible=true, goes on under replicas=2,micro" in out
    assert "before training" not in out
    assert steps(tmp_path / "r" / "metrics.jsonl") == [
        ("evaluation", 0), *(("step", step) for step in range(1, 7)), ("evaluation", 6), *(("step", step) for step in range(7, 13)),
        ("evaluation", 12),
    ]  # fmt: skip
    assert (tmp_path / "r/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()

    # Back to an earlier one of its own: that is now where the run stands.
    assert run(f"{train} --run r --resume r/checkpoints/step-00000004 --steps 5")[0] == 0
    assert steps(tmp_path / "r" / "metrics.jsonl")[-2:] == [("step", 5), ("evaluation", 5)]
    newest = Checkpoints(tmp_path / "r/checkpoints").latest()
    assert newest is not None
    assert newest.name == "step-00000005"

    # From another run, into a new one.
    status, out, _ = run(f"{train} --run fork --resume whole")
    assert status == 0
    assert "resume     whole/checkpoints/step-00000012" in out
    assert run(f"{train} --run fork --resume whole")[0] == 2, "it holds a run, and that is not the one to go on with"
    assert load_weights(tmp_path / "fork")["weight"].equal(load_weights(tmp_path / "whole")["weight"])


@pytest.mark.filterwarnings("ignore")
def test_check_says_whether_it_would_load_and_trains_nothing(run: Run, tmp_path: Path) -> None:
    assert run("train jobs.py:job --run r --steps 3")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")}
    status, out, errors = run("train jobs.py:job --run r --resume --check --plan replicas=2,reproducible=true --seed 1")
    assert (status, errors) == (1, "")
    assert out.splitlines()[:5] == [
        "r/checkpoints/step-00000003 would not load",
        "  problem  it stopped within an epoch with seed=0, and seed=1 puts other batches there",
        "  differs  saved under replicas=1,micro_batches=4, goes on under replicas=2,micro_batches=4,reproducible=true",
        "  differs  seed was 0 and is 1: the run goes on, but not to the same numbers",
        "  differs  reproducible was False and is True: the run goes on, but not to the same numbers",
    ]
    status, out, _ = run("train jobs.py:job --run r --resume --check")
    assert (status, out) == (0, "r/checkpoints/step-00000003 would load: every tensor is whole and fits\n")
    status, out, _ = run("train jobs.py:wider --run r --resume --check")
    assert status == 1
    assert "  problem  weight has the shape (1, 4), the model wants (2, 4)" in out
    assert run("train jobs.py:job --run none --resume auto --check") == (0, "there is no checkpoint yet: it would start anew\n", "")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r").rglob("*")} == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resume", ["--resume", "--resume auto"])
def test_damaged_newest_checkpoint_is_one_line_with_the_command_that_goes_on(run: Run, tmp_path: Path, resume: str) -> None:
    """Never silently an older one."""
    assert run("train jobs.py:job --run r --save-every 2 --steps 4")[0] == 0
    file = tmp_path / "r/checkpoints/step-00000004/model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    status, _, errors = run(f"train jobs.py:job --run r {resume}")
    assert status == 1
    assert re.fullmatch(
        r"error: r/checkpoints/step-00000004 cannot be used: model.safetensors is truncated: .*; "
        r"r/checkpoints/step-00000002 is whole, use it instead: "
        r"paceline train jobs.py:job --run r --resume r/checkpoints/step-00000002\n",
        errors,
    )
    assert run("train jobs.py:job --run r --resume r/checkpoints/step-00000002")[0] == 0
    assert run("checkpoint check r")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run r --resume", "--resume: there is no checkpoint in r/checkpoints; leave it out, or pass --resume auto .*"),
        ("--resume", "--resume goes on with the run in a folder; pass --run DIR, or .*"),
        ("--resume auto", "--resume auto goes on with the run in a folder; pass --run DIR, or .*"),
        ("--resume nowhere", "there is no folder nowhere; pass a checkpoint such as .*"),
        ("--resume .", "there is no checkpoint in [.]; pass a checkpoint such as .*"),
        ("--run r --resume auto --overwrite", "--overwrite throws away the run that --resume auto goes on with; .*"),
        ("--check", "--check says whether a checkpoint would load; name one with --resume"),
        ("--save-every 5", "--save-every 5 is about checkpoints, and they are kept in a run folder; pass --run DIR"),
        ("--run r --save-every 0", "--save-every 0 is not at least 1"),
        ("--best mean:max", "--best mean:max compares evaluations, .* pass --evaluate-every N"),
        ("--best mean --evaluate-every 2", "--best mean does not say which value is better; pass mean:max or mean:min"),
        ("--best f1:max --evaluate-every 2", "--best f1:max: the job's evaluations have no 'f1'; pass one of loss, mean"),
        ("--patience 2", "--patience 2 compares evaluations, .*"),
    ],
)
def test_bad_options_are_one_line(run: Run, arguments: str, message: str) -> None:
    status, out, errors = run(f"train jobs.py:job {arguments}")
    assert (status, out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", errors)


@pytest.mark.filterwarnings("ignore")
def test_best_is_kept_and_patience_ends_the_run(run: Run, tmp_path: Path) -> None:
    """The mean of the predictions rises with every step, so that the smallest is the first."""
    options = "--run r --evaluate-every 2 --save-every 2 --keep 1 --best mean:min --patience 3 --plan reproducible=true"
    status, out, _ = run(f"train jobs.py:job {options}")
    assert status == 0
    assert "stopped early after step 8: no better mean in 3 evaluations" in out
    assert "best       r/checkpoints/step-00000002" in out
    assert [path.name for path in Checkpoints(tmp_path / "r/checkpoints").list()] == ["step-00000002", "step-00000008"]
    assert run("export r best.safetensors --best")[0] == 0
    assert load_weights(tmp_path / "best.safetensors")["weight"].equal(
        load_weights(tmp_path / "r/checkpoints/step-00000002")["weight"]
    )


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_are_shown_checked_and_compared(run: Run, tmp_path: Path) -> None:
    assert run("train jobs.py:job --run r --save-every 4 --steps 8")[0] == 0
    status, out, _ = run("checkpoint show r")
    assert status == 0
    assert "after step 8" in out
    assert "AdamW" in out
    status, out, _ = run("checkpoint check r")
    assert (status, out.count(" is whole: ")) == (0, 2)
    status, out, _ = run("checkpoint diff r")
    assert status == 1
    assert out.startswith("r/checkpoints/step-00000004 and r/checkpoints/step-00000008 differ in ")
    assert "  weights/weight: 4 of 4 elements differ, by up to " in out
    assert run("checkpoint diff r/checkpoints/step-00000008 r")[0] == 0
    status, _, errors = run("checkpoint diff r/checkpoints/step-00000004")
    assert status == 2
    assert "has none before it to compare with" in errors
    shutil.rmtree(tmp_path / "r/checkpoints/step-00000004")
    assert run("checkpoint show r/checkpoints/step-00000004")[0] == 2


@pytest.mark.filterwarnings("ignore")
def test_weights_leave_as_one_file_and_as_a_hugging_face_folder(run: Run, tmp_path: Path) -> None:
    assert run("train jobs.py:gpt --run r")[0] == 0
    status, out, _ = run("export r w.safetensors")
    assert status == 0
    assert re.match(r"wrote w.safetensors, the weights of r:\n +w.safetensors +[\d,]+ bytes\n", out)
    assert run("export r/checkpoints/step-00000002 hf --job jobs.py:gpt")[0] == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    model = GPT2LMHeadModel(opened.config).eval()
    model.load_state_dict(load_weights(tmp_path / "w.safetensors"))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)
    for line, message in (
        ("export r hf2", "hf2 does not end in .safetensors; pass a name that does, or --job"),
        ("export r hf2 --job jobs.py:job", "its Linear has no save_pretrained, so it is no Hugging Face model"),
        ("export none w.safetensors", "there is nothing at none"),
        ("export r b.safetensors --best", "holds no checkpoint that was the best; train with --best"),
    ):
        status, out, errors = run(line)
        assert (status, out) == (2, "")
        assert message in errors
