"""Damage of every kind is found and named before anything is given out, and the previous whole checkpoint is offered."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import CheckpointError, Checkpoints, State, describe, load_weights
from paceline.checkpoint.checksums import checksum
from paceline.checkpoint.manifest import MANIFEST, STATE, Manifest, read_manifest
from paceline.checkpoint.reading import header_bytes
from paceline.checkpoint.tensor_files import INDEX
from paceline.errors import UsageError
from tests.checkpoint.states import a_state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (2, 3):
        Checkpoints(folder).save(a_state(step), shard_bytes=400)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Return a folder with two checkpoints, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def damaged(run: Path, says: str) -> None:
    """Make sure that the second checkpoint is refused in every way, with these words, and the first offered."""
    checkpoints, bad, good = Checkpoints(run), run / "step-00000003", run / "step-00000002"
    report = checkpoints.check(bad)
    assert not report.whole
    assert re.search(says, "\n".join(report.damage)), report.damage
    with pytest.raises(CheckpointError, match=f"(?s){says}.*{re.escape(str(good))} is whole, use it instead") as caught:
        checkpoints.load(bad)
    assert caught.value.previous == good
    assert caught.value.damage == report.damage
    with pytest.raises(CheckpointError):
        describe(bad)
    assert checkpoints.check(good).whole


def files(run: Path) -> list[Path]:
    return sorted((run / "step-00000003").iterdir())


def test_any_flipped_bit_is_found(run: Path) -> None:
    """In any byte of any file, header, text or tensor; the file is named, and in its data the tensor."""
    rng = random.Random(0)
    checkpoints, bad = Checkpoints(run), run / "step-00000003"
    manifest = read_manifest(bad)
    for path in files(run):
        whole = path.read_bytes()
        header = len(header_bytes(path)) if path.suffix == ".safetensors" else len(whole)
        places = {0, 7, 8, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(12))}
        for place in sorted(place for place in places if place < len(whole)):
            data = bytearray(whole)
            data[place] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            damage = checkpoints.check(bad).damage
            assert any(path.name in problem for problem in damage), (path.name, place, damage)
            if place >= header:
                names = list(manifest.files[path.name].tensors)
                assert any(name in problem for name in names for problem in damage), damage
        path.write_bytes(whole)
    assert checkpoints.check(bad).whole


def test_a_flipped_bit_at_load(run: Path) -> None:
    """The error names the tensor, the file and the checkpoint to use instead."""
    manifest = read_manifest(run / "step-00000003")
    path = run / "step-00000003" / next(name for name, file in manifest.files.items() if "norm.weight" in file.tensors)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    damaged(run, rf"{path.name}: [\w.]+ is damaged")
    with pytest.raises(CheckpointError, match="is whole, use it instead"):
        load_weights(run)


@pytest.mark.parametrize("cut", [0, 5, 0.5, -1])
def test_a_truncated_file_is_found(run: Path, cut: float) -> None:
    """Whichever file, wherever it ends; one that is longer, too."""
    for path in files(run):
        whole = path.read_bytes()
        end = int(len(whole) * cut) if isinstance(cut, float) else cut
        path.write_bytes(whole[:end])
        damaged(run, f"{path.name} is (truncated|damaged)")
        path.write_bytes(whole + b" ")
        damaged(run, f"{path.name} is (longer|damaged)")
        path.write_bytes(whole)


def test_a_missing_file_is_found(run: Path) -> None:
    """Whichever it is: a shard, the index, the state, the manifest."""
    for path in files(run):
        path.rename(run / "elsewhere")
        damaged(run, f"{path.name} is missing")
        path.mkdir()
        damaged(run, f"{path.name} (is not a file|cannot be read)")
        path.rmdir()
        (run / "elsewhere").rename(path)


def test_a_link_is_refused(run: Path) -> None:
    """Even one to the very bytes that were saved: what it leads to is not the checkpoint's."""
    for path in files(run):
        path.rename(run / "elsewhere")
        path.symlink_to(run / "elsewhere")
        damaged(run, f"{path.name} is a link")
        path.unlink()
        (run / "elsewhere").rename(path)


def test_a_shard_of_another_checkpoint_is_found(run: Path) -> None:
    """Same names, shapes and size, other values."""
    name = next(path.name for path in files(run) if path.name.startswith("optimizer-00001"))
    shutil.copy(run / "step-00000002" / name, run / "step-00000003" / name)
    damaged(run, f"{name}: optimizers/loss/.* is damaged")


def forge(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Rewrite a manifest with a right checksum, as only an attacker or another program would."""
    (folder / MANIFEST).write_text(change(read_manifest(folder)).to_json())


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "..\\x"])
def test_a_manifest_that_leads_outside_is_refused(run: Path, name: str) -> None:
    """Whatever its checksum says, nothing outside of the folder is read."""
    forge(
        run / "step-00000003", lambda manifest: dataclasses.replace(manifest, texts={**manifest.texts, name: (1, "crc32:00000000")})
    )
    damaged(run, re.escape(f"it names the file {name!r}, which lies outside of its folder"))


@pytest.mark.parametrize(
    "name", ["../step-00000002/model-00001-of-00002.safetensors", "/etc/passwd", "state.safetensors", "gone.safetensors"]
)
def test_an_index_that_leads_elsewhere_is_refused(run: Path, name: str) -> None:
    """Also where its checksum is right."""
    folder = run / "step-00000003"
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["norm.weight"] = name
    text = json.dumps(index)
    (folder / INDEX).write_text(text)
    told = (len(text), checksum(text.encode()))
    forge(folder, lambda manifest: dataclasses.replace(manifest, texts={**manifest.texts, INDEX: told}))
    damaged(run, f"{INDEX} names (the file {name!r} for norm.weight|other tensors or files)")


def test_other_shape_dtype_or_name_than_the_manifest_says(run: Path) -> None:
    """A file and a manifest that do not belong together are told apart by every one of these."""
    folder = run / "step-00000003"
    whole = (folder / MANIFEST).read_text()

    def change(**changes: object) -> Callable[[Manifest], Manifest]:
        def changed(manifest: Manifest) -> Manifest:
            of = {
                file: dataclasses.replace(
                    part,
                    tensors={n: dataclasses.replace(t, **changes) if n == "norm.bias" else t for n, t in part.tensors.items()},  # type: ignore[arg-type]
                )
                for file, part in manifest.files.items()
            }
            return dataclasses.replace(manifest, files=of)

        return changed

    for changes, says in (
        ({"shape": (2, 4)}, r"norm.bias is float32 \(8,\), not the float32 \(2, 4\)"),
        ({"dtype": "int32"}, r"norm.bias is float32 \(8,\), not the int32"),
        ({"checksum": "crc32:12345678"}, "norm.bias is damaged"),
    ):
        forge(folder, change(**changes))
        damaged(run, says)
        (folder / MANIFEST).write_text(whole)


def test_a_newer_format_is_told_as_what_it_is(run: Path) -> None:
    """Not as damage: with what to do."""
    path = run / "step-00000003" / MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    damaged(run, "its format is 2, and this version of Paceline reads up to 1; install a newer one")


def test_a_state_that_says_something_else_is_refused(run: Path) -> None:
    """A right checksum over a text that this version does not understand."""
    folder = run / "step-00000003"
    for text in (
        "[]",
        "{}",
        '{"$": "os.system", "items": []}',
        '{"weights": [], "progress": {"$": "tensor", "name": "x"}}',
        "nonsense",
    ):
        (folder / STATE).write_text(text)
        told = (len(text), checksum(text.encode()))
        forge(folder, lambda manifest, told=told: dataclasses.replace(manifest, texts={**manifest.texts, STATE: told}))  # type: ignore[misc]
        damaged(run, f"{STATE} does not say what this version reads")


def test_all_damage_is_told_at_once(run: Path) -> None:
    """Not one problem at a time."""
    hit = [path for path in files(run) if path.name.startswith("model-")][:2]
    for path in hit:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    told = " ".join(Checkpoints(run).check(run / "step-00000003").damage)
    assert all(path.name in told for path in hit)


def test_without_another_whole_one_the_error_says_so(run: Path) -> None:
    """Damaged ones are not offered."""
    for step in (2, 3):
        (run / f"step-0000000{step}" / STATE).unlink()
    with pytest.raises(CheckpointError, match="no other checkpoint beside it is whole") as caught:
        Checkpoints(run).load()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.damage) == (str(caught.value), caught.value.damage)


def test_what_is_not_there_is_told(run: Path) -> None:
    """A wrong path names what there is."""
    with pytest.raises(UsageError, match=r"there is no checkpoint .*step-00000009; .* holds step-00000002, step-00000003"):
        Checkpoints(run).load(run / "step-00000009")
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*empty"):
        Checkpoints(run / "empty").load()


def test_a_damaged_checkpoint_takes_nobodys_place(run: Path) -> None:
    """Pruning counts readable ones only, and goes on saving beside a broken one."""
    (run / "step-00000003" / MANIFEST).write_text("{")
    new = Checkpoints(run).save(State(weights={"w": torch.ones(1)}, progress={"steps_done": 4}), keep=2)
    assert Checkpoints(run).latest() == new
    assert Checkpoints(run).check(run / "step-00000002").whole
