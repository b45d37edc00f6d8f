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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short_and_tested(path: Path) -> None:
    """An example has at most 80 lines, stands alone, and is run by this file."""
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    others = [other.stem for other in EXAMPLES.glob("*.py")]
    assert not re.search(rf"^(?:from|import) (?:examples|{'|'.join(others)})\b", text, re.MULTILINE), "examples share nothing"
    assert f'run("{path.name}"' in Path(__file__).read_text(), f"no test runs {path.name}"
