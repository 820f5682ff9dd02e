"""Plans: from Python, a dict or TOML; every mistake at once."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier import Mesh, Plan
from espalier.models import build
from espalier.parallel import PlanError, arrange
from espalier.parallel.schedules.actions import Schedule
from espalier.parallel.tensor.tables import by_table, table_for


def test_a_plan_is_data(tmp_path: Path) -> None:
    plan = Plan(data=2, tensor=4)
    assert plan.axes == {"data": 2, "tensor": 4} and plan.world_size == 8
    assert str(plan) == "data 2 × tensor 4"
    assert plan == Plan.from_dict({"tensor": 4, "data": 2})
    file = tmp_path / "plan.toml"
    file.write_text("data = 2\ntensor = 4\n")
    assert Plan.from_toml(file) == plan
    file.write_text("[plan]\ndata = 2\ntensor = 4\n[other]\nx = 1\n")
    assert Plan.from_toml(file) == plan
    with pytest.raises(ValueError, match="frozen"):
        plan.data = 3  # type: ignore[misc]


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(data=0, tensr=2, chunk_megabytes="big", whatever=1)
    text = str(caught.value)
    assert "4 mistakes" in text
    assert "data = 0: expected greater than or equal to 1" in text
    assert "tensr = 2: unknown key; did you mean tensor?" in text
    assert "chunk_megabytes = 'big'" in text and "whatever = 1: unknown key; known keys: pipe" in text
    with pytest.raises(PlanError, match="data = 2.5"):
        Plan(data=2.5)
    with pytest.raises(ValueError, match="cannot be read"):
        Plan.from_toml(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("data = \n")
    with pytest.raises(ValueError, match="not valid TOML"):
        Plan.from_toml(broken)


def test_tables_cut_what_megatron_cuts() -> None:
    model = build("gpt", {"vocab_size": 16, "hidden": 8, "heads": 2, "layers": 1, "bias": True})
    table = table_for(model)
    assert table is not None
    cut = by_table(model, table)
    assert cut["blocks.0.attention.q_proj.weight"] == cut["blocks.0.attention.q_proj.bias"] == 0
    assert cut["blocks.0.attention.o_proj.weight"] == 1 and "blocks.0.attention.o_proj.bias" not in cut
    assert cut["embed.weight"] == cut["head.weight"] == 0
    assert not any("norm" in name for name in cut)


def test_layouts_of_a_plan() -> None:
    mesh = Mesh.dry({"data": 2, "tensor": 2})
    tied = build("gpt2", {"vocab_size": 16, "hidden": 8, "heads": 2, "layers": 1, "tied": True})
    layouts = arrange(tied, Plan(data=2, tensor=2), mesh)
    assert layouts is not None and layouts["embed.weight"].axes == ("D", 0)
    assert layouts["blocks.0.mlp.down_proj.bias"].axes == ("D", "R")
    unknown = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert arrange(unknown, Plan(data=2, tensor=2), mesh) is None, "a batch is needed to know"
    alone = arrange(unknown, Plan(data=4), Mesh.dry({"data": 4, "tensor": 1}))
    assert alone is not None and {lay.axes for lay in alone.values()} == {("D", "R")}


def test_a_plan_says_where_state_lies(tmp_path: Path) -> None:
    plan = Plan(zero=3, data=2, offload={"states": "disk", "parameters": "host", "directory": "/scratch"})
    assert str(plan) == "data 2 × tensor 1, ZeRO 3, states on disk, parameters on host"
    file = tmp_path / "plan.toml"
    file.write_text(
        "zero = 3\ndata = 2\n[offload]\nstates = 'disk'\nparameters = 'host'\ndirectory = '/scratch'\n"
    )
    assert Plan.from_toml(file) == plan
    half = Plan(
        offload={"states": {"place": "host", "ratio": 0.5}, "gradients": "auto", "budget_gigabytes": 2.0}
    )
    assert str(half).endswith("states on host (50%), gradients on host as needed")
    for wrong, said in (
        ({"states": "disk"}, "needs a folder"),
        ({"states": "host", "budget_gigabytes": 1.0}, "for a ratio that is auto"),
        ({"gradients": "host", "update": "auto"}, "no states are on the host"),
        (
            {"states": {"plce": "host"}},
            "states.plce = 'host': unknown key; did you mean offload.states.place[?]",
        ),
        ({"stats": "host"}, "did you mean offload.states[?]"),
        ({"states": "auto", "budget_gigabytes": 8e10}, "at most 10,000 gigabytes; so many bytes would be 80"),
        ({"states": "hst"}, "offload.states.place = 'hst': expected 'device', 'host' or 'disk'"),
    ):
        with pytest.raises(PlanError, match=said):
            Plan(offload=wrong)
    for key in ("chunk_megabytes", "prefetch_megabytes"):
        with pytest.raises(PlanError, match=f"{key} = 25.*: expected at most 1,000,000 megabytes; .* be 25"):
            Plan.from_dict({key: 25e6})
    with pytest.raises(PlanError, match="offload.parameters = 'host': .* expected zero >= 3"):
        Plan(data=2, zero=2, offload={"parameters": "host"})


def test_precision_is_a_word_or_a_table() -> None:
    assert Plan(precision="bfloat16") == Plan(precision={"compute": "bfloat16"})
    table = UserDict(compute="float16", loss_scale=UserDict(init_scale=2.0))  # as omegaconf's are no dicts
    assert Plan(precision=table).precision.loss_scale.init_scale == 2.0
    table = UserDict(compute="float8", keep=UserList(["*.router"]))
    assert Plan(precision=table).precision.keep == ("*.router",)
    assert str(Plan(data=2, precision={"compute": "float16", "reduce": "float32"})) == (
        "data 2 × tensor 1, float16, reduced in float32"
    )
    assert Plan(precision="autocast-float16").precision.scales
    assert not Plan(precision="bfloat16").precision.scales
    with pytest.raises(PlanError) as caught:
        Plan(
            precision={
                "compute": "bf16",
                "reduc": "float32",
                "loss_scale": {"init_scal": 2.0, "min_scale": 0},
            }
        )
    text = str(caught.value)
    assert "precision.compute = 'bf16': expected 'float32', 'bfloat16'" in text and "4 mistakes" in text
    assert "precision.reduc = 'float32': unknown key; did you mean precision.reduce?" in text
    assert "init_scal = 2.0: unknown key; did you mean precision.loss_scale.init_scale?" in text
    assert "precision.loss_scale.min_scale = 0: expected greater than 0" in text


def test_a_context_axis_cuts_no_rows() -> None:
    plan = Plan(data=2, context=3, tensor=2, replicate=2, context_kind="ring")
    assert list(plan.axes.items()) == [("replicate", 2), ("data", 2), ("context", 3), ("tensor", 2)]
    assert plan.batch_axes == ("replicate", "data") and plan.data_axes == ("replicate", "data", "context")
    assert "context 3 (ring)" in str(plan) and plan.words == {"context": "ring"}
    assert Plan(context_kind="ulysses").axes == Plan().axes and not Plan(context=2).words


def test_tensor_modes() -> None:
    def axes(**given: Any) -> dict[str, int]:
        return Plan(**given).axes

    assert axes(tensor=8, tensor_mode="2d") == {"data": 1, "row": 2, "col": 4}
    assert axes(tensor=7, tensor_mode="2d") == {"data": 1, "row": 1, "col": 7}
    assert axes(tensor=18, tensor_mode="2.5d", depth=2) == {"data": 1, "depth": 2, "row": 3, "col": 3}
    assert axes(data=2, tensor=27, tensor_mode="3d") == {"data": 2, "i": 3, "j": 3, "k": 3}
    assert Plan(tensor=8, tensor_mode="3d").batch_axes == ("data", "i", "j")
    assert Plan(tensor=8, tensor_mode="2.5d", depth=2, replicate=2).data_axes == ("replicate", "data")
    for given, message in [
        ({"tensor": 9, "tensor_mode": "3d"}, "tensor = 9: 3d needs a cube of ranks: expected 8 or 27"),
        ({"tensor": 9, "tensor_mode": "2.5d", "depth": 2}, "expected a multiple of depth = 2"),
        ({"tensor": 8, "tensor_mode": "2.5d"}, "depth = 1: 2.5d needs 2 grids or more"),
        ({"tensor": 8, "depth": 2}, "depth = 2: only tensor_mode = '2.5d' has a depth"),
        ({"tensor_mode": "4d"}, "tensor_mode = '4d'"),
    ]:
        with pytest.raises(PlanError, match=re.escape(message)):
            Plan(**given)


def test_pipelines() -> None:
    plan = Plan(pipe=4, data=2, tensor=2, schedule="interleaved", stages_per_rank=2, accumulate=8)
    assert list(plan.axes.items()) == [("pipe", 4), ("data", 2), ("tensor", 2)]
    assert plan.batch_axes == plan.data_axes == ("data",)
    assert str(plan) == "pipe 4 × data 2 × tensor 2, interleaved, 2 stages a rank"
    assert "pipe" not in Plan().axes and Plan(pipe=2, cuts=["head"]).cuts == ("head",)
    given = Schedule("mine", 2, 1, (0, 1), ((), ()))
    assert str(Plan(pipe=2, schedule=given)) == "pipe 2 × data 1 × tensor 1, mine"
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"schedule": "interleave"}, "did you mean interleaved?"),
        ({"schedule": "none.csv"}, "there is no such file"),
        ({"schedule": "zbv"}, "stages_per_rank = 1: schedule = zbv needs 2"),
        ({"schedule": "gpipe", "stages_per_rank": 2}, "schedule = gpipe needs 1"),
        ({"cuts": ("a", "b")}, "2 stage(s) begin at 1 module(s)"),
        ({"pipe": 1, "stages_per_rank": 2}, "stages need pipe of 2 or more"),
        ({"balance": "measured", "cuts": ("1",)}, "balance = 'measured': cuts are given"),
        ({"balance": "measured", "pipe": 1}, "balance = 'measured': there is one stage"),
        ({"pipe": 4, "accumulate": 2, "schedule": given}, "accumulate = 2: the schedule given is for 1"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(PlanError, match=re.escape(said)):
            Plan(**{"pipe": 2, **wrong})


def test_experts_and_branches() -> None:
    plan = Plan(data=8, expert=4, branch=2, tensor=2)
    assert plan.axes == {"data": 2, "expert": 4, "branch": 2, "tensor": 2}
    assert plan.batch_axes == plan.data_axes == ("data", "expert")
    with pytest.raises(PlanError, match="expert = 3: expected a divisor of data = 4"):
        Plan(data=4, expert=3)
    with pytest.raises(PlanError, match="expected replicate = 1"):
        Plan(data=4, expert=2, replicate=2)
    with torch.device("meta"):
        net = build("gpt", {"layers": 1})
    with pytest.raises(ValueError, match="expert = 2, but GPT has no experts"):
        arrange(net, Plan(data=2, expert=2), Mesh.dry({"data": 1, "expert": 2, "tensor": 1}))


def test_checkers_and_editors_see_every_key() -> None:
    """The signature that is written for them has the plan's fields, no more and no fewer."""
    tree = ast.parse(inspect.getsource(sys.modules[Plan.__module__]))
    found = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    written = max(([arg.arg for arg in node.args.kwonlyargs] for node in found), key=len)
    others = ["fsdp", "bf16", "fp16"]
    assert written == [*Plan.model_fields, *sys.modules[Plan.__module__]._NAMES, *others]
