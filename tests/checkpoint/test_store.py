"""Saving and loading: nothing forgotten, nothing half there, nothing lost to pruning, other savers or a full disk."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from paceline.checkpoint import Checkpoints, State, compare, random_states, set_random_states, snapshot
from paceline.checkpoint.manifest import read_manifest
from paceline.errors import UsageError
from tests.checkpoint.states import Tied, a_state, same


def tiny(step: int, **progress: Any) -> State:
    return State(weights={"w": torch.full((4,), float(step))}, progress={"steps_done": step, **progress})


def test_everything_comes_back(tmp_path: Path) -> None:
    """Every part of the state is the same after loading, to the last bit, and a second save makes the same."""
    state = a_state()
    checkpoints = Checkpoints(tmp_path / "not yet" / "there")
    loaded = checkpoints.load(checkpoints.save(state))
    assert compare(state, loaded) == []
    assert same(vars(loaded)["progress"], state.progress)
    assert same(loaded.optimizers["loss"].groups, state.optimizers["loss"].groups)
    assert same(loaded.random, state.random)
    assert compare(loaded, checkpoints.load(checkpoints.save(loaded))) == []
    Tied().load_state_dict(loaded.weights)


def test_unusual_weights_come_back(tmp_path: Path) -> None:
    """Every dtype, views, no elements, no dimensions, extra state, versions of modules, conjugates."""
    base = torch.arange(12.0).reshape(3, 4)
    weights = {str(dtype): torch.ones(3).to(dtype) for dtype in (torch.complex64, torch.complex128, torch.bfloat16, torch.bool)}
    weights |= {str(dtype): torch.ones(3).to(dtype) for dtype in (torch.uint16, torch.float8_e4m3fn, torch.float8_e8m0fnu)}
    weights |= {"view": base[:, 1:3], "transposed": base.t(), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    weights |= {"conjugate": torch.tensor([1 + 2j]).conj(), "expanded": torch.ones(1).expand(5), "é/ü": torch.zeros(1)}
    extra: dict[str, Any] = {"mine._extra_state": {"scale": (1, 2.0)}}
    state = State(weights=weights | extra, progress={"steps_done": 0})
    loaded = Checkpoints(tmp_path).load(Checkpoints(tmp_path).save(state))
    assert same(loaded.weights, state.weights)

    versioned = nn.BatchNorm1d(2).state_dict()
    loaded = Checkpoints(tmp_path).load(Checkpoints(tmp_path).save(State(weights=versioned, progress={"steps_done": 1})))
    assert loaded.weights._metadata == versioned._metadata  # type: ignore[attr-defined]


def test_loaded_tensors_can_be_written_to(tmp_path: Path) -> None:
    """They are mapped from the files, which a write to them does not reach."""
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(tiny(1))
    checkpoints.load(path).weights["w"].fill_(9)
    assert checkpoints.check(path).whole
    assert checkpoints.load(path).weights["w"][0] == 1


def test_tied_weights_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    """One storage under two names takes its bytes once, and is one tensor again."""
    model = Tied()
    path = Checkpoints(tmp_path).save(State(weights=model.state_dict(), progress={"steps_done": 1}))
    loaded = Checkpoints(tmp_path).load(path)
    assert list(loaded.weights) == list(model.state_dict())
    assert loaded.weights["head.weight"] is loaded.weights["embed.weight"]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118 - it is not a mapping


def test_shards_have_an_index_and_load(tmp_path: Path) -> None:
    """Weights and optimizer state are cut at a size; the index is that of Hugging Face."""
    state = a_state(width=16)
    path = Checkpoints(tmp_path).save(state, shard_bytes=1000)
    names = {file.name for file in path.iterdir()}
    shards = sorted(name for name in names if name.startswith("model-"))
    assert len(shards) >= 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert any(name.startswith("optimizer-00002-of-") for name in names)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert set(index["weight_map"]) == set(state.weights) - {"head.weight"}
    size = sum(tensor.numel() * tensor.element_size() for name, tensor in state.weights.items() if name != "head.weight")
    assert index["metadata"]["total_size"] == size
    assert compare(Checkpoints(tmp_path).load(path), state) == []


def test_no_pickle_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither saving nor loading touches pickle."""
    state = a_state()

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    assert compare(Checkpoints(tmp_path).load(Checkpoints(tmp_path).save(state)), state) == []


def test_what_cannot_be_stored_leaves_nothing(tmp_path: Path) -> None:
    """A refusal comes before the first byte is written."""
    with pytest.raises(UsageError, match="objects/mine is a function"):
        Checkpoints(tmp_path / "run").save(State(weights={}, progress={"steps_done": 1}, objects={"mine": lambda: 0}))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="steps_done"):
        State(weights={}, progress={})


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    """Pruning keeps as many as asked, in the order of saving, and always the best."""
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.list() == []
    assert checkpoints.latest() is checkpoints.best() is None
    for step in range(1, 7):
        checkpoints.save(tiny(step), keep=2, best=step in (2, 3))
    assert [path.name for path in checkpoints.list()] == ["step-00000003", "step-00000005", "step-00000006"]
    assert checkpoints.best() == tmp_path / "step-00000003"
    assert checkpoints.latest() == tmp_path / "step-00000006"
    assert [path.name for path in checkpoints.prune(1)] == ["step-00000005"]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000003", "step-00000006"}


def test_a_run_that_went_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """After going on from step 2 of 9, what is saved at 3 is the latest, and is not pruned as the oldest."""
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 8, 9):
        checkpoints.save(tiny(step))
    checkpoints.save(tiny(3), keep=2)
    assert checkpoints.latest() == tmp_path / "step-00000003"
    assert [path.name for path in checkpoints.list()] == ["step-00000009", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """The newer one counts; there is no moment without either."""
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(tiny(1, run=1))
    second = checkpoints.save(tiny(1, run=2))
    assert checkpoints.list() == [second]
    assert not first.exists()
    assert checkpoints.load().progress["run"] == 2
    third = checkpoints.save(tiny(1, run=3))
    assert [third] == checkpoints.list()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_file_that_may_not_grow_is_one_clear_error(tmp_path: Path) -> None:
    """The system's own refusal: earlier checkpoints stay whole and nothing is left behind."""
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(tiny(1))
    big = State(weights={"w": torch.zeros(100_000)}, progress={"steps_done": 2})
    with pytest.raises(UsageError, match=r"cannot save .*step-00000002: File too large; it needs 40\d,\d\d\d bytes"):
        checkpoints.save(big)
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoints.check(first).whole


@pytest.mark.parametrize("room", [0, 40, 500, 3000, 9000])
def test_full_disk_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Wherever the disk runs full: one message with path and bytes, the hidden folder gone, earlier checkpoints whole."""
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(tiny(1))
    left = [room]
    lock, real = threading.Lock(), os.pwrite

    def full(file: int, data: Any, start: int) -> int:
        with lock:
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            part = memoryview(data)[: left[0]]
            left[0] -= len(part)
        return real(file, part, start)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UsageError, match=r"cannot save .*step-00000003: No space left .* needs [\d,]+ bytes, [\d,]+ are free"):
        checkpoints.save(a_state(3))
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [first]
    assert checkpoints.check(first).whole


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A file where the folder should be, for one."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot save .*file"):
        Checkpoints(tmp_path / "file").save(tiny(1))


def test_threads_that_save_at_once_all_save(tmp_path: Path) -> None:
    """Also the same step: each checkpoint is whole, and what the others are writing is not cleaned away."""
    failures: list[BaseException] = []

    def save(offset: int) -> None:
        try:
            for step in range(8):
                Checkpoints(tmp_path).save(tiny(step + offset), keep=None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(offset,)) for offset in (0, 0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted({path.name.split(".")[0] for path in Checkpoints(tmp_path).list()}) == [f"step-{step:08d}" for step in range(12)]
    assert all(Checkpoints(tmp_path).check(path).whole for path in Checkpoints(tmp_path).list())
    assert not list(tmp_path.glob(".*"))


TWO_SAVERS = """
import os, sys, torch
from paceline.checkpoint import Checkpoints, State
torch.set_num_threads(1)
gate, go = os.pipe()
savers = []
for start in (0, 1):
    savers.append(os.fork())
    if savers[-1] == 0:
        os.close(go)
        os.read(gate, 1)
        for step in range(start, 30, 2):
            state = State(weights={"w": torch.full((5000,), float(step))}, progress={"steps_done": step})
            Checkpoints(sys.argv[1]).save(state, keep=4)
        os._exit(0)
os.close(go)  # both start now
print([os.waitpid(saver, 0)[1] for saver in savers])
"""


def test_two_processes_save_into_one_folder(tmp_path: Path) -> None:
    """Neither disturbs the other, and what is left is whole."""
    done = subprocess.run([sys.executable, "-c", TWO_SAVERS, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[0, 0]\n", done.stdout + done.stderr
    checkpoints = Checkpoints(tmp_path)
    assert len(checkpoints.list()) == 4
    for path in checkpoints.list():
        state = checkpoints.load(path)
        assert state.weights["w"].eq(state.steps_done).all()


def test_left_overs_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    """The next save cleans up, told by locks rather than by age or number of a process."""
    checkpoints = Checkpoints(tmp_path)
    dead = [tmp_path / ".step-00000001.abcd.saving", tmp_path / ".step-00000002.abcd.removing"]
    for folder in dead:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".notes").mkdir()
    living = tmp_path / ".step-00000003.abcd.saving"
    living.mkdir()
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, str(living)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        checkpoints.save(tiny(4))
        assert {path.name for path in tmp_path.iterdir()} == {".notes", living.name, "step-00000004"}
        holder.kill()
    checkpoints.save(tiny(5))
    assert not living.exists()


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    """Training goes on in place; what was snapped is what is saved, ties included."""
    state = a_state()
    snapped = snapshot(state)
    aside = Checkpoints(tmp_path / "aside")
    before = aside.load(aside.save(state))
    for tensor in state.weights.values():
        tensor.zero_()
    state.progress["epoch"] = 99
    state.optimizers["loss"].entries["norm.weight"]["exp_avg"].zero_()
    assert snapped.weights["head.weight"] is snapped.weights["embed.weight"]
    assert compare(Checkpoints(tmp_path).load(Checkpoints(tmp_path).save(snapped)), before) == []
    assert compare(state, before)


def test_random_states_go_through_a_checkpoint(tmp_path: Path) -> None:
    """All three generators draw on as if nothing had happened; what is no state changes none."""
    before = random_states()
    path = Checkpoints(tmp_path).save(State(weights={}, progress={"steps_done": 0}, random=before))
    torch.rand(3)
    set_random_states(Checkpoints(tmp_path).load(path).random)
    assert same(random_states(), before)
    with pytest.raises(UsageError, match="random generators"):
        set_random_states({**before, "python": 5, "torch": torch.zeros_like(before["torch"])})
    assert same(random_states(), before)


@pytest.mark.parametrize("settings", [{"keep": 0}, {"shard_bytes": 0}])
def test_bad_settings_are_refused(tmp_path: Path, settings: dict[str, int]) -> None:
    """With what is allowed."""
    with pytest.raises(UsageError, match=f"{next(iter(settings))}=0"):
        Checkpoints(tmp_path).save(tiny(1), **settings)


def test_manifest_says_what_there_is(tmp_path: Path) -> None:
    """Sizes are those of the files, and every tensor has its dtype, shape and checksum."""
    path = Checkpoints(tmp_path).save(a_state(), shard_bytes=1000)
    manifest = read_manifest(path)
    assert manifest.sizes == {file.name: file.stat().st_size for file in path.iterdir() if file.name != "checkpoint.json"}
    stored = {name: of for file in manifest.files.values() for name, of in file.tensors.items()}
    assert stored["norm.weight"].dtype == "float32"
    assert stored["norm.weight"].shape == (8,)
    assert stored["norm.weight"].checksum.startswith("crc32:")
