"""What ``espalier.explain`` tells, on dry meshes: no process is needed."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import wrap_torch_function
from torch.utils.checkpoint import checkpoint

import espalier
from espalier import DTensor, Explanation, GatherWarning, Mesh, Partial, Plan, Replicate, Shard
from espalier.models import build
from espalier.tensor.observers import watchers

R, P = Replicate(), Partial()
S = Shard


def zeros(mesh: Mesh, shape: tuple[int, ...], *placements: object, grad: bool = False) -> DTensor:
    return espalier.zeros(shape, device_mesh=mesh, placements=list(placements), requires_grad=grad)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh.dry({"data": 2, "tensor": 2})


def test_a_row_tells_layouts_traffic_and_reasons(mesh: Mesh) -> None:
    x, w = zeros(mesh, (8, 6), S(0), R), zeros(mesh, (4, 6), R, S(0), grad=True)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    seen = espalier.explain(lambda: F.linear(x, w).sum())
    linear, total = seen.rows
    assert (linear.op, linear.how, linear.phase, linear.depth) == ("linear", "rule", "forward", 0)
    assert linear.where == f"tests/pure/test_explain.py:{line}"
    given, weight = linear.inputs
    assert (given.shape, given.states, given.placed) == ((8, 6), ("S(0)", "R"), ("S(0)", "D"))
    assert (weight.states, weight.placed) == (("R", "S(0)"), ("D", "S(0)"))
    assert [out.states for out in linear.outputs] == [("S(0)", "S(1)")]
    assert linear.sent == []
    assert linear.sent_backward == [("all_reduce", "data", 48)]
    assert len(linear.notes) == 1 and linear.notes[0].startswith("defer: input 1"), "x needs no gradient"
    data, tensor = linear.choices
    assert (data.axis, tensor.axis) == ("data", "tensor")
    assert [o.bytes for o in tensor.options] == [0, 48]
    assert tensor.told == "R, S(0) => S(1): 0 B sends least; or all replicated: 48 B"
    assert [out.states for out in total.outputs] == [("P(sum)", "P(sum)")]
    assert seen.totals == {"data": {"forward": 0, "backward": 48}, "tensor": {"forward": 0, "backward": 0}}
    assert isinstance(seen.result, DTensor) and w.grad is None, "explaining leaves no gradients behind"


def reason(seen: Explanation, op: str, axis: str) -> str:
    (row,) = (row for row in seen.rows if row.op == op)
    return next(choice.told for choice in row.choices if choice.axis == axis)


def test_reasons_for_what_is_forced(mesh: Mesh) -> None:
    x, p = zeros(mesh, (8, 6), S(0), S(1)), zeros(mesh, (8, 6), P, R)
    seen = espalier.explain(lambda: (x.sort(dim=1), p.exp(), p * p, x + p))
    assert reason(seen, "sort", "tensor") == "dim 1 of input 0 must be whole"
    assert reason(seen, "exp", "data") == "it is not linear in input 0, so the P(sum) is reduced first"
    assert "not linear" not in reason(seen, "add", "data"), "the shard of the other input is why"
    assert "input 1 is P(sum), but another is cut" in reason(seen, "add", "data")
    sends = {row.op: [event[:2] for event in row.sent] for row in seen.rows}
    assert sends["sort"] == [("all_gather", "tensor")]
    assert sends["exp"] == [("all_reduce", "data")]
    assert sends["add"] == [("reduce_scatter", "data")]


def test_ties_are_told(mesh: Mesh) -> None:
    a, b = zeros(mesh, (8, 6), R, R), zeros(mesh, (8, 6), P, R)
    told = reason(espalier.explain(torch.add, a, b), "add", "data")
    assert told.startswith("all replicated: 192 B sends as little and leaves less Partial; or P(sum), P(sum)")


@wrap_torch_function(lambda x: (x,))
def unruled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_composites_gathers_and_traffic(mesh: Mesh) -> None:
    x = zeros(mesh, (8, 6), S(0), R)
    heads = nn.MultiheadAttention(6, 2, device="meta")
    for module in heads.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, espalier.distribute_tensor(p, mesh))

    def run() -> torch.Tensor:
        heads(x, x, x)
        with pytest.warns(GatherWarning):
            unruled(x)
        return x.full_tensor()

    seen = espalier.explain(run)
    entered = next(row for row in seen.rows if row.op == "multi_head_attention_forward")
    inner = [row for row in seen.rows if row.depth]
    assert entered.how == "entered" and entered.depth == 0 and {row.depth for row in inner} >= {1}
    assert {"linear", "bmm"} <= {row.op for row in inner}
    gathered = next(row for row in seen.rows if row.op == "unruled")
    assert gathered.how == "gathered" and gathered.sent == [("all_gather", "data", 96)]
    assert (seen.rows[-1].how, seen.rows[-1].op) == ("traffic", "DTensor.full_tensor")
    assert "unruled (no rule: gathered)" in str(seen)


def test_recomputation_stands_in_the_backward_pass(mesh: Mesh) -> None:
    x, w = zeros(mesh, (8, 6), S(0), R, grad=True), zeros(mesh, (6,), R, S(0))

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x * w).sin()

    seen = espalier.explain(lambda: checkpoint(block, x, use_reentrant=False).sum())
    assert [row.op for row in seen.rows if row.phase == "backward"] == ["mul", "sin"]


def test_a_training_step_of_a_model(mesh: Mesh) -> None:
    plan = Plan(data=2, tensor=2)
    sizes = {"vocab_size": 64, "max_positions": 16, "layers": 3, "hidden": 32, "heads": 4}
    with torch.device("meta"):
        model = build("gpt", sizes)
        tokens = torch.zeros(8, 16, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    engine = espalier.initialize(model, torch.optim.SGD(model.parameters(), 0.1), plan, mesh=mesh)
    engine.train_step(batch)
    with espalier.ledger(mesh) as book:
        engine.train_step(batch)
    with espalier.ledger(mesh) as again:
        seen = espalier.explain(engine.train_step, batch)
    assert again == book, "being watched changes nothing"
    assert {axis: sum(phases.values()) for axis, phases in seen.totals.items()} == book.by_axis()
    up = [row for row in seen.rows if row.module.endswith("mlp.gate_proj") and row.op == "linear"]
    assert [row.module for row in up] == [f"blocks.{i}.mlp.gate_proj" for i in range(3)]
    assert all(row.sent_backward == [("all_reduce", "tensor", 8192)] for row in up)
    assert all(row.where.startswith("espalier/models/gpt.py:") for row in up)
    buckets = [row for row in seen.rows if row.op == "Gradients._send"]
    assert buckets and all(row.phase == "backward" for row in buckets)
    text = str(seen)
    assert "blocks.*.mlp.gate_proj" in text and "3 times" in text
    assert max(map(len, text.splitlines())) <= 110
    assert json.loads(json.dumps(seen.to_dict()))["totals"] == seen.totals


def test_contexts_nest_and_leave_the_dispatcher_as_it_was(mesh: Mesh) -> None:
    assert not watchers() and not mesh.ledgers
    x = zeros(mesh, (8, 6), S(0), R)
    with espalier.explaining() as outer:
        x.sin()
        with espalier.explaining() as inner:
            x.cos().sum()
            other = Mesh.dry({"only": 2})
            zeros(other, (4,), P).exp()
        x.tan()
    x.neg()
    assert [row.op for row in outer.rows] == ["sin", "cos", "sum", "exp", "tan"]
    assert [row.op for row in inner.rows] == ["cos", "sum", "exp"]
    assert inner.rows[-1].sent == [("all_reduce", "only", 16)], "a mesh made meanwhile is watched too"
    with pytest.raises(RuntimeError, match="stop"), espalier.explaining():
        raise RuntimeError("stop")
    assert not watchers()
    assert not mesh.ledgers and not other.ledgers and not Mesh.everywhere
