"""The examples run as they stand, and show what they say that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
TIMEOUT_S = 300


def run(name: str, *launcher: str) -> str:
    """Return what an example prints; `launcher` are the arguments that come before it."""
    # One thread each, so that two processes on two cores do not fight.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers_after(words: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(re.escape(words) + r" (-?\d+\.\d+)", text)]


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_plain_loop_and_paceline_loop_have_the_same_losses() -> None:
    """Two workers give the losses of the plain loop, up to rounding."""
    plain, paceline = run("plain_loop.py"), run("paceline_loop.py")
    expected = numbers_after("loss of the last batch", plain)
    assert len(expected) == 4
    assert numbers_after("loss of the last batch", paceline) == pytest.approx(expected, abs=1e-4)
    assert numbers_after("held-out accuracy", paceline) == pytest.approx(numbers_after("held-out accuracy", plain), abs=0.01)


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_paceline_loop_prints_the_same_under_torchrun() -> None:
    """The same script with threads and under torchrun with two processes prints the same, once."""
    assert run("paceline_loop.py", *TORCHRUN) == run("paceline_loop.py")


@pytest.mark.timeout(TIMEOUT_S)
def test_hugging_face_model_learns() -> None:
    """A Transformers model trains with its scheduler, ignored labels and a metric."""
    text = run("hugging_face.py")
    losses = re.search(r"loss (\S+) -> (\S+), accuracy (\S+) -> (\S+)", text)
    assert losses is not None, text
    loss_before, loss_after, _, accuracy_after = map(float, losses.groups())
    assert loss_after < 0.5 * loss_before
    assert accuracy_after > 0.6


@pytest.mark.timeout(TIMEOUT_S)
def test_gan_learns_the_ring() -> None:
    """Two named losses train in turn; generated points come to lie near the ring."""
    text = run("gan.py")
    (radius,) = numbers_after("radius of generated points:", text)
    assert 0.7 < radius < 1.3, text


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_from_torch_ddp_has_the_weights_of_torch_ddp() -> None:
    """Alone and in two processes the Trainer's weights are those of torch's wrapper, up to rounding."""
    for launcher, workers in (((), 1), (TORCHRUN, 2)):
        text = run("coming_from/from_torch_ddp.py", *launcher)
        assert f"workers {workers}," in text
        (difference,) = numbers_after("largest difference of a weight", text)
        assert difference < 1e-6


@pytest.mark.timeout(TIMEOUT_S * 2)
def test_from_accelerate_prints_the_same_under_torchrun() -> None:
    """Labels of different number, a last batch of one row, and a warm-up: the same with threads and with processes."""
    text = run("coming_from/from_accelerate.py")
    assert "[0.002, 0.0065, 0.011, 0.0155, 0.02, 0.02]" in text, "one step of the scheduler for each of the optimizer"
    assert "49 rows" in text
    assert run("coming_from/from_accelerate.py", *TORCHRUN) == text


@pytest.mark.timeout(TIMEOUT_S)
def test_from_lightning_fabric_goes_on_under_other_workers() -> None:
    """What was saved by two workers goes on with four, and ends where one uninterrupted worker ends."""
    text = run("coming_from/from_lightning_fabric.py")
    assert text.splitlines() == [
        "went on after step 12, saved by other workers",
        "weights: the same bits",
        "average: the same bits",
    ]


@pytest.mark.timeout(TIMEOUT_S)
def test_from_hugging_face_trainer_exports_the_best() -> None:
    """The best checkpoint is loaded at the end, and what is exported of it opens with the same logits."""
    text = run("coming_from/from_hugging_face_trainer.py")
    losses = re.search(r"loss (\S+) -> (\S+) at step", text)
    assert losses is not None, text
    assert float(losses[2]) < 0.6 * float(losses[1])
    assert "same logits: True" in text


@pytest.mark.timeout(TIMEOUT_S)
def test_from_deepspeed_reads_the_plan_out_of_the_configuration() -> None:
    """Rows of a step and of a forward become replicas and micro-batches, and the job learns."""
    text = run("coming_from/from_deepspeed.py")
    assert "replicas=2,micro_batches=8: step 80," in text
    losses = re.search(r"loss (\S+) -> (\S+)", text)
    assert losses is not None, text
    assert float(losses[2]) < 0.5 * float(losses[1])


ALL = sorted(EXAMPLES.rglob("*.py"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.relative_to(EXAMPLES).as_posix())
def test_example_is_short_and_tested(path: Path) -> None:
    """An example has at most 80 lines, 60 where it shows a change of loop, stands alone, and is run by this file."""
    text, name = path.read_text(), path.relative_to(EXAMPLES).as_posix()
    assert len(text.splitlines()) <= (60 if name.startswith("coming_from/") else 80)
    others = [other.stem for other in ALL]
    assert not re.search(rf"^(?:from|import) (?:examples|{'|'.join(others)})\b", text, re.MULTILINE), "examples share nothing"
    assert f'run("{name}"' in Path(__file__).read_text(), f"no test runs {name}"
