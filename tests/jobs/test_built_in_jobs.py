"""The built-in jobs: real data, split for good, models that anybody could have written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs import digits, find_job, gpt
from paceline.jobs.source_text import Windows, is_held_out, read_source_text


def library(root: Path, files: int) -> Path:
    for number in range(files):
        (root / f"module_{number}.py").write_text(f"NAME = {number}\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "module_x.py").write_text("FOREIGN = 1\n")
    return root


def test_source_text_is_split_by_file(tmp_path: Path) -> None:
    train, held_out = (bytes(part.tolist()).decode() for part in read_source_text(library(tmp_path, 60)))
    for number in range(60):
        line = f"NAME = {number}\n"
        mine, other = (held_out, train) if is_held_out(f"module_{number}.py") else (train, held_out)
        assert line in mine
        assert line not in other
    assert "FOREIGN" not in train + held_out


def test_missing_source_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found no source code of the Python standard library"):
        read_source_text(tmp_path)


def test_windows_predict_the_next_byte() -> None:
    windows = Windows(torch.arange(10, dtype=torch.uint8), length=4)
    assert len(windows) == 2
    assert [part.tolist() for part in windows[1]] == [[4, 5, 6, 7], [5, 6, 7, 8]]
    with pytest.raises(IndexError):
        windows[2]


def test_gpt_starts_at_chance_and_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = gpt.ByteGPT(width=32, depth=2, heads=2).eval()
    ids = torch.randint(0, 256, (2, 16))
    following = torch.randint(0, 256, (2, 16))
    assert gpt.loss(model, (ids, following)).item() == pytest.approx(math.log(256), abs=0.3)
    changed = ids.clone()
    changed[:, 8:] = 0
    torch.testing.assert_close(model(ids)[:, :8], model(changed)[:, :8])
    assert model.head.weight is model.embed.weight


def test_gpt_sample_is_printable_and_draws_from_no_shared_stream() -> None:
    torch.manual_seed(0)
    model = gpt.ByteGPT(width=32, depth=1, heads=2)
    state = torch.get_rng_state()
    text = gpt.sample(model, length=20)
    assert text == gpt.sample(model, length=20)
    assert text.startswith("def ")
    assert all(letter.isprintable() or letter in "\n\t" for letter in text)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


def test_gpt_job_has_about_three_million_parameters_and_decays_matrices_only() -> None:
    job = find_job("gpt")
    model = job.model()  # type: ignore[operator]
    assert 2_500_000 < sum(parameter.numel() for parameter in model.parameters()) < 4_000_000
    decayed, others = gpt.optimizer(list(model.named_parameters())).param_groups
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert len(job.held_out) == gpt.HELD_OUT_WINDOWS


def test_gpt_schedule_warms_up_and_comes_down() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = gpt.scheduler(optimizer, 200)
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    peak = rates.index(max(rates))
    assert rates[0] < 0.1
    assert rates[peak] == pytest.approx(1.0)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_digits_are_the_uci_images_split_for_good() -> None:
    train, held_out = digits.load()
    assert (len(train), len(held_out)) == (1438, 359)
    assert int(train.images.max()) == 16
    counts = torch.bincount(held_out.labels.long(), minlength=10)
    assert int(counts.min()) >= 34
    assert torch.equal(digits.load()[1].images, held_out.images)
    image, label = held_out[0]
    assert image.shape == (1, 8, 8)
    assert 0 <= float(image.min()) <= float(image.max()) <= 1
    assert 0 <= label <= 9


def test_digits_augmentation_follows_torchs_stream() -> None:
    train, _ = digits.load()
    torch.manual_seed(1)
    first = [train[7][0] for _ in range(8)]
    torch.manual_seed(1)
    again = [train[7][0] for _ in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(first[0], other) for other in first)
