"""Weights in from wherever they are, and out to where others read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from paceline.checkpoint import CheckpointError, Checkpoints, State, export_weights, load_weights
from paceline.errors import UsageError
from tests.checkpoint.states import Tied, a_state, same


@pytest.fixture(scope="module")
def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    ).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(10)[None]).logits
    return result


def state_of(model: nn.Module, step: int = 1) -> State:
    return State(weights=model.state_dict(), progress={"steps_done": step})


def test_a_checkpoint_and_a_config_are_a_hugging_face_folder(gpt: GPT2LMHeadModel, tmp_path: Path) -> None:
    """Its shards and index are opened by `from_pretrained` as they are, and give the same logits."""
    path = Checkpoints(tmp_path).save(state_of(gpt), shard_bytes=6000)
    assert (path / "model.safetensors.index.json").exists()
    gpt.config.save_pretrained(path)
    opened = AutoModelForCausalLM.from_pretrained(path).eval()
    assert torch.equal(logits(opened), logits(gpt))
    assert Checkpoints(tmp_path).check(path).whole


def test_export_opens_with_from_pretrained_and_comes_back(gpt: GPT2LMHeadModel, tmp_path: Path) -> None:
    """The folder is the library's own, and `load_weights` takes it back."""
    checkpoint = Checkpoints(tmp_path / "run").save(state_of(gpt))
    fresh = GPT2LMHeadModel(gpt.config)
    folder = export_weights(checkpoint, tmp_path / "export", fresh)
    opened = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(opened), logits(gpt))
    back = load_weights(folder)
    assert all(same(back[name], tensor) for name, tensor in gpt.state_dict().items() if name in back)
    assert not GPT2LMHeadModel(gpt.config).load_state_dict(back, strict=False).unexpected_keys
    with pytest.raises(UsageError, match="exists already"):
        export_weights(checkpoint, tmp_path / "export", fresh)


def test_shards_of_hugging_face_are_read(gpt: GPT2LMHeadModel, tmp_path: Path) -> None:
    """As written by `save_pretrained`, from the folder or from the index, and through the links of its cache."""
    cache = tmp_path / "models--me--gpt"
    snapshot = cache / "snapshots" / "abc"
    gpt.save_pretrained(snapshot, max_shard_size="8KB")
    assert (snapshot / "model.safetensors.index.json").exists()
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.glob("*.safetensors"))):
        shutil.move(file, cache / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    for source in (snapshot, snapshot / "model.safetensors.index.json"):
        weights = load_weights(source)
        assert all(same(tensor, gpt.state_dict()[name]) for name, tensor in weights.items())
        assert len(weights) >= len(gpt.state_dict()) - 1


def sharded(folder: Path) -> dict[str, str]:
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "two.safetensors"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"b": "../outside.safetensors"}, "outside of its folder"),
        ({"b": "/etc/passwd"}, "outside of its folder"),
        ({"b": "link.safetensors"}, "outside of its folder"),
        ({"b": "gone.safetensors"}, "gone.safetensors is missing"),
        ({"b": "one.safetensors"}, "one.safetensors lacks b"),
        ({"c": "two.safetensors"}, "two.safetensors lacks c"),
        ({"b": 3}, "3 is missing"),
        (None, "is damaged"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, changes: dict[str, Any] | None, says: str) -> None:
    """Files outside of the folder, by name or by link, missing shards, tensors that are not where it says."""
    weight_map = sharded(tmp_path / "hf")
    save_file({"b": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (tmp_path / "hf" / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    words = {"metadata": {}, "weight_map": weight_map | changes} if changes is not None else ["nothing"]
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match=says):
        load_weights(tmp_path / "hf")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """Named, with nothing given out."""
    path = export_weights({"w": torch.ones(100)}, tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"w\.safetensors cannot be used: it is no whole safetensors file"):
        load_weights(path)


def test_a_plain_file_goes_out_and_in(tmp_path: Path) -> None:
    """Ties are kept; the file is replaced in one moment and nothing else is left."""
    model = Tied()
    path = export_weights(state_of(model, 5), tmp_path / "w.safetensors")
    for loaded in (load_weights(path), load_weights(export_weights(path, path))):
        assert same({name: loaded[name] for name in model.state_dict()}, dict(model.state_dict()))
    assert {file.name for file in tmp_path.iterdir()} == {"w.safetensors"}


def test_a_run_folder_gives_its_newest_weights(tmp_path: Path) -> None:
    """The newest checkpoint; `model.safetensors` where that says that it is later, or is all there is."""
    old, new = ({"w": torch.full((2,), value)} for value in (1.0, 2.0))
    save_file(old, tmp_path / "model.safetensors")
    assert load_weights(tmp_path)["w"][0] == 1
    Checkpoints(tmp_path / "checkpoints").save(State(weights=new, progress={"steps_done": 7}))
    assert load_weights(tmp_path)["w"][0] == 2
    assert load_weights(tmp_path / "checkpoints")["w"][0] == 2
    export_weights(State(weights={"w": torch.full((2,), 3.0)}, progress={"steps_done": 8}), tmp_path / "model.safetensors")
    assert load_weights(tmp_path)["w"][0] == 3
    with_optimizer = Checkpoints(tmp_path / "checkpoints").save(a_state(9))
    (with_optimizer / "optimizer.safetensors").unlink()
    assert "norm.weight" in load_weights(tmp_path), "weights alone do not need the optimizer's files"


def test_what_holds_no_weights_is_told(tmp_path: Path) -> None:
    """Pickles are refused unread, with what to do; so is a folder without weights."""
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="is a pickle, which can run any code"):
        load_weights(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickle files only \(pytorch_model.bin\)"):
        load_weights(tmp_path)
    with pytest.raises(UsageError, match="nothing at"):
        load_weights(tmp_path / "gone")
    for name in ("a", "b"):
        save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UsageError, match=r"2 \.safetensors files without"):
        load_weights(tmp_path)


def test_bad_exports_are_refused(gpt: GPT2LMHeadModel, tmp_path: Path) -> None:
    """Weights of another model, a module that cannot write itself, a name that is no safetensors file, extra state."""
    before = {name: tensor.clone() for name, tensor in gpt.state_dict().items()}
    with pytest.raises(UsageError, match=r"not those of the GPT2LMHeadModel: .*transformer.* is missing"):
        export_weights({"w": torch.zeros(1)}, tmp_path / "x", gpt)
    assert same(dict(gpt.state_dict()), before)
    with pytest.raises(UsageError, match="no save_pretrained"):
        export_weights({}, tmp_path / "x", nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"pass for example .*x\.safetensors"):
        export_weights({}, tmp_path / "x.bin")
    with pytest.raises(UsageError, match="extra is not a tensor"):
        export_weights({"extra": 1}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
