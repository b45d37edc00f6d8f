"""A job is found by its name or in a file; whatever is wrong with it is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.job import Job
from paceline.jobs import find_job

FILE = """
import torch
from torch import nn
from sibling import WIDTH
from paceline.job import Job

def job():
    data = torch.utils.data.TensorDataset(torch.zeros(4, WIDTH), torch.zeros(4, 1))
    return Job(model=lambda: nn.Linear(WIDTH, 1), loss=lambda m, b: (m(b[0]) - b[1]).square().mean(),
               optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=data, batch_size=2)

def three():
    return 3

def of_width(width):
    return job()

def raising():
    raise KeyError("weights")

def refused():
    return Job(model=nn.Linear(2, 1), loss=3, optimizer=lambda named: None)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))  # puts sys.path back afterwards
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sibling.py").write_text("WIDTH = 3\n")
    path = tmp_path / "my_job.py"
    path.write_text(FILE)
    return path


def test_job_of_a_file_may_import_its_siblings(file: Path) -> None:
    job = find_job(f"{file}:job")
    assert isinstance(job, Job)
    assert job.batch_size == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gtp", "no job 'gtp'; a job is gpt, digits, or path.py:function; did you mean gpt?"),
        ("my_job.py", "write my_job.py:function"),
        ("my_jbo.py:job", "there is no file my_jbo.py; did you mean my_job.py?"),
        ("elsewhere/x.py:job", "there is no file elsewhere/x.py; write path.py:function"),
        ("my_job.py:jbo", "my_job.py has no function 'jbo'; it has job, three, of_width, raising, refused; did you mean job?"),
        ("my_job.py:three", "my_job.py:three returned int; it must return a paceline.Job"),
        ("my_job.py:of_width", "my_job.py:of_width needs width; a job function takes no required arguments"),
        ("my_job.py:raising", r"my_job.py:raising raised KeyError: 'weights' \(line 19\)"),
        ("my_job.py:refused", "loss=3 is not a function"),
    ],
)
def test_wrong_jobs_are_refused_in_one_line(file: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", "[?]")) as caught:
        find_job(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such\n", r"cannot run broken.py: ModuleNotFoundError: No module named 'no_such' \(line 1\)"),
        ("x = 1\ny = (\n", r"cannot run broken.py: SyntaxError: '\(' was never closed \(broken.py, line 2\)"),
        ("raise SystemExit(3)\n", r"cannot run broken.py: SystemExit: 3 \(line 1\)"),
    ],
)
def test_file_that_does_not_run_is_told_with_its_line(file: Path, source: str, message: str) -> None:
    file.with_name("broken.py").write_text(source)
    with pytest.raises(UsageError, match=message) as caught:
        find_job("broken.py:job")
    assert caught.value.__cause__ is not None
