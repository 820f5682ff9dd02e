"""DeepSpeed's configuration: every key has a fate, and becomes the plan that it means."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier import Plan
from espalier.compat.deepspeed import ops, schedules
from espalier.compat.deepspeed.config import read
from espalier.compat.deepspeed.keys import KEYS, markdown
from espalier.engine.norm import LossScaler
from espalier.mesh import Mesh
from espalier.parallel.plan import LossScale
from espalier.parallel.several import Several

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
ROWS = {"train_micro_batch_size_per_gpu": 4}


def test_page_has_the_table() -> None:
    """The page lists every key, as the code does."""
    assert markdown() in PAGE.read_text("utf-8"), (
        "write espalier.compat.deepspeed.keys.markdown() into the page"
    )


def plan(ranks: int = 2, **tables: Any) -> Plan:
    """The plan of a configuration."""
    return read({**ROWS, **tables}, ranks).plan


@pytest.mark.parametrize(
    ("tables", "means"),
    [
        ({}, {"data": 2}),
        ({"gradient_clipping": 0.0}, {"data": 2, "clip": None}),
        (
            {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5},
            {"data": 2, "accumulate": 3, "clip": 0.5},
        ),
        ({"zero_optimization": {"stage": 2}}, {"data": 2, "zero": 2}),
        ({"zero_optimization": True}, {"data": 2, "zero": 1}),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8}},
            {"data": 2, "zero": 2, "chunk_megabytes": 800.0},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "reduce_bucket_size": 5e8,
                    "stage3_prefetch_bucket_size": 1e6,
                }
            },
            {"data": 2, "zero": 3, "chunk_megabytes": 25.0, "prefetch_megabytes": 4.0},
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            {"data": 2, "zero": 1, "offload": {"states": {"place": "host", "ratio": 0.5}}},
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
                }
            },
            {
                "data": 2,
                "zero": 3,
                "offload": {
                    "states": "host",
                    "gradients": "host",
                    "parameters": "disk",
                    "directory": "/scratch",
                },
            },
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, {"data": 2, "zero": 3}),
        ({"bf16": {"enabled": True}}, {"data": 2, "precision": "bfloat16"}),
        ({"bfloat16": {"enabled": True}}, {"data": 2, "precision": "bfloat16"}),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            {"data": 2, "precision": {"compute": "bfloat16", "reduce": "float32"}},
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            {"data": 2, "precision": "autocast-float16"},
        ),
        ({"tensor_parallel": {"autotp_size": 2}}, {"data": 1, "tensor": 2}),
        ({"sequence_parallel_size": 2}, {"data": 1, "context": 2, "context_kind": "ulysses"}),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"data": 2, "recompute": "full"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"data": 2, "recompute_inputs": "host"}),
        ({"train_batch_size": "auto", "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, {"data": 2}),
    ],
)
def test_plans(tables: dict[str, Any], means: dict[str, Any]) -> None:
    """What a configuration means."""
    assert plan(**tables) == Plan(**{"clip": 1.0, **means})


def test_hpz() -> None:
    """Parameters are cut inside of groups."""
    made = plan(8, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4})
    assert made == Plan(data=4, replicate=2, zero=3, clip=1.0)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({}, {"init_scale": 2.0**16, "growth_interval": 1000, "hysteresis": 2}),
        (
            {"initial_scale_power": 8, "loss_scale_window": 10, "hysteresis": 1, "min_loss_scale": 4},
            {"init_scale": 256.0, "growth_interval": 10, "min_scale": 4.0},
        ),
        ({"consecutive_hysteresis": True}, {"growth_interval": 1000, "hysteresis": 2, "refill": "always"}),
        ({"loss_scale": 128}, {"init_scale": 128.0, "growth_factor": 1.0, "backoff_factor": 1.0}),
    ],
)
def test_loss_scales(given: dict[str, Any], means: dict[str, Any]) -> None:
    """All of the scaler's keys."""
    made = plan(fp16={"enabled": True, **given}).precision
    assert made.compute == "float16" and made.loss_scale == LossScale(**means)


@pytest.mark.parametrize(
    ("scale", "finite", "scales"),
    [
        # two overflows before it falls; growth fills the count again
        ({"hysteresis": 2, "growth_interval": 2}, "nnyynn", [8, 4, 4, 8, 8, 4]),
        # a good step does
        ({"hysteresis": 2, "refill": "always", "growth_interval": 9}, "nynynn", [8, 8, 8, 8, 8, 4]),
        ({"hysteresis": 2, "growth_interval": 9}, "nynynn", [8, 8, 4, 4, 2, 1]),
        # a fixed one
        ({"growth_factor": 1.0, "backoff_factor": 1.0, "growth_interval": 1}, "nyn", [8, 8, 8]),
    ],
)
def test_hysteresis(scale: dict[str, Any], finite: str, scales: list[float]) -> None:
    """The scale follows overflows as it is told, also from a saved state on."""
    mesh, given = Mesh.from_env({"data": 1}), LossScale(init_scale=8.0, **scale)
    scaler, found = LossScaler(given), []
    for answer in finite:
        norm = torch.tensor(1.0 if answer == "y" else math.inf)
        assert scaler.update(norm, {}, [], mesh) is (answer == "y")
        found.append(scaler.scale)
        state, scaler = scaler.state_dict(), LossScaler(given)
        scaler.load_state_dict(state)
    assert found == scales


@pytest.mark.parametrize(
    ("tables", "rows"),
    [
        ({"train_batch_size": 16}, (16, 8, 1)),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, (16, 4, 2)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, (16, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (32, 4, 4)),
    ],
)
def test_batches(tables: dict[str, Any], rows: tuple[int, int, int]) -> None:
    """Any two give the third."""
    made = read(tables, 2)
    assert (made.train_batch, made.micro_batch, made.plan.accumulate) == rows


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"train_batch_size": 10, **ROWS}, ["= 10: expected train_micro_batch_size_per_gpu 4", "= 8"]),
        ({"gradient_accumulation_steps": 2}, ["train_batch_size: is missing"]),
        ({**ROWS, "zero_optimisation": {}}, ["unknown key; did you mean zero_optimization?"]),
        ({**ROWS, "zero_optimization": {"stag": 1}}, ["did you mean zero_optimization.stage?"]),
        ({**ROWS, "zero_optimization": {"stage": 4}}, ["zero_optimization.stage = 4: expected 0, 1, 2 or 3"]),
        ({**ROWS, "fp16": True}, ["fp16 = True: expected a table"]),
        (
            {**ROWS, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ["bf16.enabled = True: fp16.enabled is so"],
        ),
        ({**ROWS, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, ["not to be had here"]),
        (
            {**ROWS, "zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
            ["expected stage 3"],
        ),
        (
            {**ROWS, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            ["offload_optimizer.nvme_path: is missing"],
        ),
        ({**ROWS, "tensor_parallel": {"autotp_size": 3}}, ["2 ranks are no multiple of tensor 3"]),
        (
            {**ROWS, "amp": {"enabled": True}, "autotuning": {"enabled": True}},
            ["2 mistakes", "espalier plan"],
        ),
        ({**ROWS, "pipeline": {"stages": 2}}, ["the model is a pipeline of 1 stage(s)"]),
        ({**ROWS, "gradient_allreduce_op": "sum"}, ["multiply the loss"]),
    ],
)
def test_mistakes(tables: dict[str, Any], told: list[str]) -> None:
    """All are told, each with what to do."""
    with pytest.raises(ValueError, match="DeepSpeed's configuration: ") as error:
        read(tables, 2)
    assert all(part in str(error.value) for part in told), str(error.value)


def test_what_asks_for_nothing_is_no_mistake() -> None:
    """Refused keys may stand there, off; others are told to have no effect."""
    off = {
        "amp": {"enabled": False},
        "zero_optimization": {"zero_quantized_weights": False, "mics_shard_size": -1},
    }
    made = read({**ROWS, **off, "prescale_gradients": True, "aio": {"queue_depth": 8}}, 1)
    assert [key.name for key in made.idle] == ["prescale_gradients", "aio.queue_depth"]
    assert "aio.queue_depth: files are read" in made.notes


def test_files(tmp_path: Path) -> None:
    """JSON in a file, and in base64."""
    text = json.dumps(ROWS)
    (tmp_path / "config.json").write_text(text)
    for given in (tmp_path / "config.json", base64.urlsafe_b64encode(text.encode()).decode()):
        assert read(given, 2).train_batch == 8
    (tmp_path / "twice.json").write_text('{"train_batch_size": 1, "train_batch_size": 2}')
    with pytest.raises(ValueError, match="train_batch_size: stands there twice"):
        read(tmp_path / "twice.json", 1)
    with pytest.raises(ValueError, match="expected a dict, the path of a JSON file"):
        read(tmp_path / "none.json", 1)


# ---- optimizers and schedules


class Net(nn.Module):
    """An embedding, a matrix, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mid = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.mid(self.embed(ids)))).square().mean()


@pytest.mark.parametrize(
    ("name", "params", "kind"),
    [
        ("Adam", {"lr": 0.1, "betas": [0.8, 0.9]}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, torch.optim.Adam),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW),
        ("AdamW", {"weight_decay": 0.1}, torch.optim.AdamW),
        ("Adagrad", {}, torch.optim.Adagrad),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD),
        ("Lion", {}, ops.Lion),
        ("lamb", {}, ops.Lamb),
        ("Muon", {"lr": 0.01, "adam_lr": 0.1}, Several),
    ],
)
def test_optimizers(name: str, params: dict[str, Any], kind: type) -> None:
    """By name, with the options given; a loss falls."""
    torch.manual_seed(0)
    net, ids = Net(), torch.arange(5)
    made = ops.make(name, params, net, None)
    assert type(made) is kind
    if name == "Adam":
        own = params.get("torch_adam") and kind is torch.optim.AdamW  # torch's default, as there
        assert all(group["weight_decay"] == (0.01 if own else 0) for group in made.param_groups)
    first = net(ids).item()
    for _ in range(3):
        made.zero_grad()
        net(ids).backward()
        made.step()
        made.load_state_dict(made.state_dict())
    assert net(ids).item() < first


def test_muon_takes_matrices() -> None:
    """Embeddings and the head are Adam's; groups keep their own options."""
    net = Net()
    groups = [{"params": [*net.parameters()][:2], "lr": 0.5}, {"params": [*net.parameters()][2:]}]
    made = ops.make("Muon", {"lr": 0.01, "momentum": 0.8}, net, groups)
    found = [(g["use_muon"], g["lr"], len(g["params"])) for g in made.param_groups]
    assert found == [(True, 0.5, 1), (False, 0.5, 1), (False, 0.01, 2)]


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("Adamm", {}, "unknown optimizer; did you mean"),
        ("OneBitAdam", {}, "gradients are not compressed"),
        ("MuAdam", {}, "from mup"),
        ("Adam", {"beta": 1}, "optimizer.params.beta = 1: unknown key; did you mean optimizer.params.betas?"),
        ("Adam", {"max_grad_norm": 1}, "gradient_clipping"),
        ("Muon", {"momentun": 1}, "did you mean momentum?"),
    ],
)
def test_wrong_optimizers(name: str, params: dict[str, Any], told: str) -> None:
    """Are told with what was meant."""
    with pytest.raises(ValueError, match="mistake") as error:
        ops.make(name, params, Net(), None)
    assert told in str(error.value)


def rates(name: str, params: dict[str, Any], steps: int) -> list[float]:
    """The learning rate before each step."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, found = schedules.make(name, params, optimizer), []
    for i in range(steps):
        found.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        if i == 1:
            after = schedules.make(name, params, optimizer)
            after.load_state_dict(schedule.state_dict())
            schedule = after
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "params", "found"),
    [
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.25, 0.5, 0.75, 1, 1]),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"},
            [0, 0, 0.5, 1, 0.5, 0, 0],
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2},
            [0.1, 0.3, 0.5, 0.3, 0.1],
        ),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 1}, [0.1, 0.2, 0.3, 0.4]),
        ("StepLR", {"step_size": 2}, [1, 1, 0.1]),
    ],
)
def test_schedules(name: str, params: dict[str, Any], found: list[float]) -> None:
    """Rates by hand."""
    if name.startswith("Warmup"):
        params = {"warmup_max_lr": 1.0, **params}
    assert rates(name, params, len(found)) == found


def test_cosine() -> None:
    """Up in a line, down along a cosine, and no lower."""
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.1, "warmup_type": "linear"}
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule, found = schedules.make("WarmupCosineLR", params, optimizer), []
    for _ in range(8):
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    after = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1, k / 4))) / 2) for k in range(1, 7)]
    assert found == pytest.approx([0, 1.0, *after])


class Watched(dict[str, Any]):
    """A table that takes down the keys that it is asked for."""

    def __init__(self, table: dict[str, Any], asked: set[str], at: str = "") -> None:
        inner = {k: Watched(x, asked, f"{at}{k}.") if isinstance(x, dict) else x for k, x in table.items()}
        super().__init__(inner)
        self.asked, self.at = asked, at

    def get(self, key: Any, *more: Any) -> Any:
        self.asked.add(f"{self.at}{key}")
        return super().get(key, *more)

    def __contains__(self, key: object) -> bool:
        self.asked.add(f"{self.at}{key}")
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(f"{self.at}{key}")
        return super().__getitem__(key)

    def __deepcopy__(self, known: Any) -> Any:
        return self


def test_every_key_that_deepspeed_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its code looks up in a configuration, and whatever its models of sections name, is a key."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install --no-deps deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    from espalier.compat.deepspeed.keys import ALIASES

    sections = {name.rpartition(".")[0] for name in KEYS if "." in name}
    whole: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {}}}
    whole["scheduler"] = {"type": "WarmupLR", "params": {}}
    for section in sections:
        table = whole
        for part in section.split("."):
            table = table.setdefault(part, {})
    asked: set[str] = set()
    DeepSpeedConfig(Watched(whole, asked))
    within = {".".join(s.split(".")[:n]) for s in sections for n in range(1, 4)}
    assert sorted(k for k in asked if ALIASES.get(k, k) not in KEYS and k not in within) == []
    assert len(asked) > 100
    own = {
        kind.__name__: kind for kind in _below(DeepSpeedConfigModel) if ".inference." not in kind.__module__
    }
    ends = {name.rpartition(".")[2] for name in [*KEYS, *ALIASES]} | {s.rpartition(".")[2] for s in within}
    inside = {"ZenFlowConfig", "DeepSpeedZeroLeafModuleConfig", "HybridEngineConfig"}  # of what is one key
    fields = {
        f"{kind}.{field.alias or name}": field.alias or name
        for kind, model in own.items()
        if kind not in inside
        for name, field in model.model_fields.items()
    }
    assert [where for where, name in fields.items() if name not in ends] == [] and len(own) > 15


def _below(kind: Any) -> list[Any]:
    return [x for one in kind.__subclasses__() for x in (one, *_below(one))]


def test_against_deepspeed() -> None:
    """Every key that DeepSpeed's own tables have is known here, and schedules are the same."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install --no-deps deepspeed")
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    tables = {
        "compile": CompileConfig,
        "comet": CometConfig,
        "csv_monitor": CSVConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    }
    names = [
        f"{section}.{f.alias or n}" for section, kind in tables.items() for n, f in kind.model_fields.items()
    ]
    from espalier.compat.deepspeed.keys import ALIASES

    assert [name for name in names if ALIASES.get(name, name) not in KEYS] == []
    for name, params in (
        ("WarmupLR", {"warmup_num_steps": 4}),
        ("WarmupDecayLR", {"total_num_steps": 12, "warmup_num_steps": 4}),
        ("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
        ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
        (
            "OneCycle",
            {
                "cycle_min_lr": 0.1,
                "cycle_max_lr": 0.5,
                "cycle_first_step_size": 4,
                "decay_step_size": 2,
                "decay_lr_rate": 0.1,
                "cycle_first_stair_count": 2,
            },
        ),
    ):
        found = []
        for make in (getattr(lr_schedules, name), getattr(schedules, name)):
            optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.3)
            schedule, each = make(optimizer, **params), []
            for _ in range(20):
                each.append((float(optimizer.param_groups[0]["lr"]), *optimizer.param_groups[0]["betas"]))
                schedule.step()
            found.append(each)
        assert found[0] == [pytest.approx(x, abs=1e-12) for x in found[1]], name
