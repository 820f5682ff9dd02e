"""What kind of device there is, one module knows."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from espalier import Mesh, device
from espalier.comm import Work, control
from espalier.engine import start
from espalier.mesh import mesh, process
from espalier.tensor.rules import ring
from espalier.train import optimizers
from espalier.train.sections import OptimizerSection

TOOL = Path(__file__).parents[2] / "tools" / "devices.py"  # `make lint` runs it on the package
PROGRAM = """
import torch
from torch.backends import cudnn
def cuda(x: torch.Stream) -> None:
    "What a docstring says of CUDA is free."
    x.to("xpu:0")
    torch.accelerator.synchronize()
    torch.Stream(x)
    torch.get_device_module(x).Event()
    x.is_cuda, torch.zeros(1, pin_memory=True), "capuchin"
"""


def test_code_that_names_a_kind_of_device_is_seen() -> None:
    """So that whatever runs on one runs on every accelerator that torch knows."""
    spec = importlib.util.spec_from_file_location("devices_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    said = {word for _, word in tool.said(ast.parse(PROGRAM))}
    assert said == {
        *("cudnn", "cuda", "xpu:0", "torch.accelerator.synchronize", "torch.Stream"),
        *("torch.get_device_module", "x.is_cuda", "pin_memory"),
    }


def test_what_the_page_names_is_there() -> None:
    """Each line of docs/devices.md says what shows it."""
    root = Path(__file__).parents[2]
    plans = (root / "tests" / "sim" / "test_plans.py").read_text(encoding="utf-8")
    rows = [line for line in (root / "docs" / "devices.md").read_text().splitlines() if line.startswith("| ")]
    shown = [row.rpartition(" | ")[2] for row in rows if not row.startswith("| item")]
    assert len(shown) > 40
    for row in shown:
        files = re.findall(r"`((?:pure|ranks|sim)/\w+\.py)`", row)
        texts = "".join((root / "tests" / name).read_text(encoding="utf-8") for name in files)
        assert files, row
        for name in re.findall(r"`(test_\w+?)(?:\.\.\.)?`", row):
            assert f"def {name}" in texts, name
        for name in re.findall(r"`([^`]+)`(?=[,)])", row):
            assert name.startswith("test_") or "/" in name or f'"{name}": (' in plans, name


def test_a_cpu_has_no_streams_and_pins_nothing() -> None:
    cpu = torch.device("cpu")
    assert not device.is_accelerator(cpu) and not device.is_accelerator("meta")
    assert device.new_stream(cpu) is None and not device.pins(cpu) and not device.has_peak(cpu)
    assert device.backends(cpu) == {"backend": "gloo"}
    x = torch.zeros(3)
    assert device.copy_by(None, [(x, torch.ones(3))], cpu) is None and x.sum() == 3


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="device type 'tpo': expected"):
        device.choose("tpo", 0, 1)
    if device.accelerator() is None:
        with pytest.raises(
            ValueError, match="2 ranks on this machine need a device of type 'cuda' each, but 0"
        ):
            device.choose("cuda", 0, 2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the machine one with so many GPUs, and nothing in the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def are(n: int) -> None:
        monkeypatch.setattr(device, "accelerator", lambda: "cuda")
        monkeypatch.setattr(mesh, "accelerator", lambda: "cuda")
        monkeypatch.setattr(device, "count", lambda: n)
        monkeypatch.setattr(process, "count", lambda: n)

    return are


def chosen(monkeypatch: pytest.MonkeyPatch, **environment: object) -> str:
    """The device of a rank that finds that environment."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    place = process._read_environment()
    assert place is not None
    *_, local_rank, local_size, apart = place
    return str(device.choose(None, local_rank, local_size, apart=apart))


def test_a_process_alone_is_on_the_machine_s_accelerator(gpus: Any) -> None:
    """Not, silently, on the CPU."""
    assert Mesh.from_env({"data": 1}).device_type == "cpu"
    gpus(1)
    assert Mesh.from_env({"data": 1}).device_type == "cuda"
    assert Mesh.from_env({"data": 1}, "cpu").device_type == "cpu"


@pytest.mark.parametrize(
    ("backends", "kind"),
    [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")],
)
def test_the_device_of_a_world_is_asked_of_its_backends(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, backends: str, kind: str
) -> None:
    """One that was started without a backend has no name of one."""
    gpus(1)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    assert device.of_world() == kind


def test_gloo_does_not_carry_what_lies_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the device's memory from the host."""
    monkeypatch.setattr(mesh, "backend_of", lambda kind, group: "gloo")
    group: Any = object()
    mesh._check_backends([None, group], "cpu")
    mesh._check_backends([None], "cuda")
    with pytest.raises(ValueError, match="tensors of 'cuda' by gloo"):
        mesh._check_backends([None, group], "cuda")


def test_one_process_without_a_world_asks_nobody(gpus: Any) -> None:
    """As a script that is started without torchrun does, where a budget is looked at."""
    gpus(1)
    assert not dist.is_initialized()
    assert control.numbers_of_all([3, 4], Mesh.single(("data",), "cuda")) == [[3, 4]]


def test_a_model_stays_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(start, "use", used.append)
    start._stay_on_device(torch.nn.Linear(2, 2))
    there = [SimpleNamespace(device=torch.device("cuda", 3))]
    monkeypatch.setattr(start, "parameters_in", lambda model: there)
    start._stay_on_device(torch.nn.Linear(2, 2))
    assert used == [torch.device("cuda", 3)]


def test_too_few_devices_are_said(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    with pytest.warns(
        UserWarning, match="4 of them on this machine need a device of type 'cuda' each, but 2"
    ):
        assert device.choose(None, 0, 4) == torch.device("cpu")
    monkeypatch.setenv("ESPALIER_SHARE_DEVICE", "1")
    assert [device.choose(None, i, 4).index for i in range(4)] == [0, 1, 0, 1]


SLURM = {"RANK": 5, "WORLD_SIZE": 16, "SLURM_STEP_NUM_TASKS": 16, "SLURM_LOCALID": 5, "SLURM_NODEID": 1}


def test_the_device_of_a_task_of_slurm(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    assert chosen(monkeypatch, **SLURM, SLURM_STEP_TASKS_PER_NODE="8(x2)") == "cuda:5"


def test_a_task_that_sees_its_own_device_alone(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by --gpus-per-task=1, whoever sets the local rank."""
    gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert chosen(monkeypatch, **SLURM, SLURM_STEP_TASKS_PER_NODE="8(x2)") == "cuda:0"
    assert chosen(monkeypatch, LOCAL_RANK=5, LOCAL_WORLD_SIZE=8) == "cuda:0"


def test_ranks_of_one_environment_do_not_take_one_device_for_their_own(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert chosen(monkeypatch, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2) == "cpu"


def test_ranks_that_know_nothing_but_their_number(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take turns, and not all the first device."""
    gpus(4)
    assert chosen(monkeypatch, RANK=6, WORLD_SIZE=8) == "cuda:2"


def test_an_optimizer_is_tried_on_the_cpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a job opens no context on the first device, also where options are for accelerators."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # both ask a driver otherwise
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = SimpleNamespace(is_capturing=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    monkeypatch.setattr(optimizers, "accelerator", lambda: "cuda")
    capturable = OptimizerSection(name="AdamW", capturable=True)
    assert not list(optimizers.optimizer_mistakes(capturable))
    negative = OptimizerSection(name="AdamW", betas=[-1.0, 0.5])
    assert "beta" in str(list(optimizers.optimizer_mistakes(negative)))


def test_what_travels_round_the_ring_lies_where_kernels_may_read_it() -> None:
    """The lse goes ahead of the queries, and need not fill whole vectors."""
    parts = [torch.rand(1, 3, 5), *(torch.rand(1, 3, 5, 8).bfloat16() for _ in range(3))]
    way: Any = SimpleNamespace(axis=0, mesh=None)
    with patch.object(ring.collectives, "passing", lambda sent, *_: Work.done(sent)):
        message = ring._Message(way, parts, [(x.shape, x.dtype) for x in parts], 1, parts[0])
    for x, got in zip(parts, message.wait(), strict=True):
        assert torch.equal(x, got)
        assert got.storage_offset() * got.itemsize % 16 == 0
