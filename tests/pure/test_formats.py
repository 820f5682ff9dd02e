"""Files of other formats: what is read and written, in one process; none of it is executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from espalier.checkpoint.foreign import Foreign
from espalier.checkpoint.index import FormatError, TensorInfo
from espalier.checkpoint.sinks import FileSink, Tie, contiguous_boxes, export, stream
from espalier.checkpoint.sources import Checkpoint, open_any
from espalier.cli import app
from espalier.layout.layout import Box

STATE: dict[str, torch.Tensor] = {
    "a.weight": torch.arange(60.0).view(4, 5, 3),
    "b": torch.tensor(-0.0, dtype=torch.float64),
    "c/../d": torch.arange(7).to(torch.bfloat16),
    "empty": torch.empty(0, 3),
    "mask": torch.tensor([True, False]),
    "small": torch.randn(9, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*bits)


def call(*args: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout + result.stderr


def test_pieces_are_contiguous_and_all() -> None:
    x = torch.arange(4 * 5 * 3)
    for most in (8, 24, 50, 120, 10**6):
        found = list(contiguous_boxes(TensorInfo((4, 5, 3), torch.int64), most))
        assert all(x.view(4, 5, 3)[box.slices].numel() * 8 <= max(most, 8) for _, box in found)
        assert torch.equal(torch.cat([x.view(4, 5, 3)[box.slices].flatten() for _, box in found]), x)
        assert [x.view(4, 5, 3)[box.slices].flatten()[0].item() * 8 for _, box in found] == [
            s for s, _ in found
        ]


@pytest.mark.parametrize("form", ["safetensors", "sharded", "torch"])
def test_files_are_as_others_write_them(tmp_path: Path, form: str) -> None:
    entries = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in STATE.items()}
    path = tmp_path / "out.pt" if form == "torch" else tmp_path / "out"
    with FileSink() as sink:
        if form == "torch":
            sink.add_torch(path, {**entries, "tie": Tie("a.weight"), "lr": 0.5})
        else:
            sink.add_sharded(path, entries, 100 if form == "sharded" else 10**9)
        assert not any(x.suffix in (".safetensors", ".pt") for x in tmp_path.rglob("*")), "not whole yet"
        stream(entries, lambda name, box: STATE[name][box.slices], sink.write, most=16)
    if form == "torch":
        found = torch.load(path, weights_only=True)
        assert found.pop("tie").data_ptr() == found["a.weight"].data_ptr() and found.pop("lr") == 0.5
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, "checksums are right"
    else:
        files = sorted(path.glob("*.safetensors"))
        assert (len(files) > 1) == (form == "sharded")
        found = {name: x for file in files for name, x in load_file(file).items()}
    assert found.keys() == STATE.keys() and all(same(found[name], x) for name, x in STATE.items())
    source = open_any(path)
    assert all(same(source.read(name), x) for name, x in STATE.items())
    box = Box((1, 2, 1), (3, 2, 2))
    assert same(source.read("a.weight", box), STATE["a.weight"][box.slices])


def test_export_and_import(tmp_path: Path) -> None:
    """From one format to the next, and back to where it began; what accompanies weights goes along."""
    start = tmp_path / "start"
    start.mkdir()
    save_file(STATE, start / "model.safetensors")
    (start / "config.json").write_text("{}")
    assert call("import", start, tmp_path / "ours")[0] == 0
    assert call("export", tmp_path / "ours", tmp_path / "folder", "--format", "dcp")[0] == 0
    assert call("export", tmp_path / "folder", tmp_path / "file.pt", "--format", "torch")[0] == 0
    assert call("export", tmp_path / "file.pt", tmp_path / "end", "--like", start)[0] == 0
    code, said = call("export", tmp_path / "file.pt", tmp_path / "none", "--like", tmp_path / "nowhere")
    assert code == 2 and "nowhere has no config.json" in said
    found = load_file(tmp_path / "end" / "model.safetensors")
    assert found.keys() == STATE.keys() and all(same(found[name], x) for name, x in STATE.items())
    assert (tmp_path / "end" / "config.json").read_text() == "{}"
    step = Checkpoint(tmp_path / "ours" / "step-00000000")
    step.verify()
    assert call("export", tmp_path / "ours", tmp_path / "low", "--dtype", "bfloat16")[0] == 0
    assert load_file(tmp_path / "low" / "model.safetensors")["a.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere", "out"], "does not exist"),
        (["x.pt", "x.pt"], "exists: nothing is written over"),
        (["x.pt", "out", "--format", "onnx"], "expected one of safetensors, torch, dcp"),
        (["x.pt", "out", "--dtype", "int8"], "expected a dtype of floats"),
        (["x.pt", "out", "--tree", "no"], "holds no tensors under no."),
        (["x.pt", "file/out"], "cannot be written"),
        (["two.pt", "out"], "holds tensors under ema, net: say which"),
        (["folder", "out"], "holds no weights: expected"),
        (["file", "out"], "cannot be read as what torch.save writes"),
    ],
)
def test_mistakes_of_export(tmp_path: Path, monkeypatch: Any, args: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("no weights")
    torch.save({"w": torch.ones(2)}, "x.pt")
    torch.save({"ema": {"w": torch.ones(2)}, "net": {"w": torch.ones(2)}}, "two.pt")
    code, printed = call("export", *args)
    assert code == 2 and said in printed and "Traceback" not in printed and "not foreseen" not in printed


def test_what_a_full_disk_cannot_take_is_told_once_and_goes(tmp_path: Path) -> None:
    """What was still to be written when the file was closed met the disk again, and hid the error."""
    with pytest.raises(ValueError, match="it was told"), FileSink() as sink:
        sink.add_safetensors(tmp_path / "x.safetensors", {"w": TensorInfo((2,), torch.float32)})
        (path,) = sink._files
        sink._files[path].close()
        sink._files[path] = Path("/dev/full").open("wb")  # noqa: SIM115
        sink.write("w", 0, Box((0,), (2,)), torch.ones(2))
        raise ValueError("it was told")
    assert not any(tmp_path.iterdir())


def test_what_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    torch.save({str(i): torch.ones(99) for i in range(9)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", (tmp_path / "cut.pt").stat().st_size // 2)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    (tmp_path / "page.pt").write_text("<!DOCTYPE html>")
    for name, said in (
        ("cut.pt", "cut.pt cannot be read as what torch.save writes: .*It is damaged"),
        (
            "module.pt",
            r"torch\.nn\.modules\.linear\.Linear was not an allowed global by default\. It is",
        ),
        ("page.pt", r"writes: Unsupported operand 60\. It is damaged"),
    ):
        with pytest.raises(FormatError, match=said):
            open_any(tmp_path / name)


class Payload:
    """Pickled, it is a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_of_a_checkpoint_is_executed(tmp_path: Path) -> None:
    """A payload in a torch.save file, in torch's .metadata, and in a value of a distributed checkpoint."""
    proof = tmp_path / "proof"
    torch.save({"w": torch.ones(2), "x": Payload(proof)}, tmp_path / "bad.pt")
    with pytest.raises(FormatError, match="objects of classes, which are not loaded"):
        open_any(tmp_path / "bad.pt")

    torch.save({"w": torch.ones(2), "x": 1}, tmp_path / "good.pt")
    export(tmp_path / "good.pt", tmp_path / "good", "dcp")
    folder = tmp_path / "good"
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(FormatError, match="it asks for posix.system, which metadata has no use for"):
        open_any(folder)

    with (folder / "__0_1.distcp").open("wb") as file:
        torch.save(Payload(proof), file)
    import torch.distributed.checkpoint.metadata as kinds
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    metadata = pickle.loads(good)
    metadata.state_dict_metadata["x"] = kinds.BytesStorageMetadata()
    size = (folder / "__0_1.distcp").stat().st_size
    metadata.storage_data[kinds.MetadataIndex("x")] = _StorageInfo("__0_1.distcp", 0, size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    source = open_any(folder)
    assert torch.equal(source.read("model.w"), torch.ones(2))
    with pytest.raises(FormatError, match="objects of classes, which are not loaded"):
        source.values["x"]
    assert not proof.exists()
    pickle.loads(pickle.dumps(Payload(proof)))
    assert proof.exists(), "the payload works where pickles are executed"


@pytest.mark.parametrize("name", ["../secret.pt", "/etc/passwd", "..", "", "a/b", "a\0b", 3])
def test_files_elsewhere_are_not_read(tmp_path: Path, name: Any) -> None:
    """Whatever an index or metadata says, files are read from the checkpoint's folder alone."""
    import json

    torch.save({"w": torch.ones(2)}, tmp_path / "secret.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="Files elsewhere are not read"):
        open_any(folder)
    export(tmp_path / "secret.pt", tmp_path / "dcp", "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(FormatError, match="Files elsewhere are not read"):
        open_any(tmp_path / "dcp")


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(3, 2), "b": torch.ones(1)}}, tmp_path / "x.pt")
    model = torch.nn.Linear(2, 4)
    with pytest.raises(FormatError) as caught:
        Foreign(open_any(tmp_path / "x.pt"), model, None)
    said = str(caught.value)
    assert "does not hold the weights of this Linear" in said and "bias is missing" in said
    assert "weight is [4, 2], there [3, 2]" in said and "state_dict.b is not in the model" in said

    optimizer = torch.optim.SGD(model.parameters())
    adam = torch.optim.Adam(model.parameters())
    torch.save({"model": model.state_dict()}, tmp_path / "alone.pt")
    with pytest.raises(FormatError, match="holds no optimizers"):
        Foreign(open_any(tmp_path / "alone.pt"), model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, tmp_path / "adam.pt")
    with pytest.raises(FormatError, match="it has the option betas, which this one has not"):
        Foreign(open_any(tmp_path / "adam.pt"), model, optimizer)
    assert Foreign(open_any(tmp_path / "adam.pt"), model, adam).values["optimizer"]["groups"]

    apart = torch.optim.Adam([{"params": [p], "weight_decay": p.ndim} for p in model.parameters()])
    torch.save({"model": model.state_dict(), "optimizer": apart.state_dict()}, tmp_path / "apart.pt")
    with pytest.raises(FormatError, match="parameters of the optimizer's group 0 differ in weight_decay"):
        Foreign(open_any(tmp_path / "apart.pt"), model, adam)
    torch.save({"layer._flat_param": torch.ones(5)}, tmp_path / "flat.pt")
    with pytest.raises(FormatError, match="Flat parameters have no names: save with SHARDED_STATE_DICT"):
        Foreign(open_any(tmp_path / "flat.pt"), model, None)


def test_states_that_cannot_be_taken_are_told(tmp_path: Path) -> None:
    """Without names; or one tensor, as FSDP's full states on a CPU: the last kind takes the place of all."""
    model = torch.nn.Linear(2, 4)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    state = adam.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "whole.pt")
    Foreign(open_any(tmp_path / "whole.pt"), model, adam)
    code, said = call("import", tmp_path / "whole.pt", tmp_path / "out", "--optimizer")
    assert code == 2 and "numbers the optimizer's parameters" in said
    state["state"][1]["exp_avg"] = state["state"][1]["exp_avg_sq"]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "lost.pt")
    with pytest.raises(FormatError, match="one and the same tensor as exp_avg and exp_avg_sq of bias"):
        Foreign(open_any(tmp_path / "lost.pt"), model, adam)
