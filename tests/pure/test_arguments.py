"""Wrong arguments of the public functions: what was given, what was expected, what to do; none is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier import DTensor, Faults, Layout, Mesh, Plan, Replicate, RunLog, Shard, Spikes

R, S0 = Replicate(), Shard(0)
T = torch.ones(4, 6)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def meta() -> nn.Module:
    with torch.device("meta"):
        return net()


def start(**options: Any) -> espalier.Engine:
    return espalier.initialize(net(), None, **options)


def on(call: Callable[[Mesh], Any]) -> Callable[[], Any]:
    """A call that gets a mesh of two axes."""
    return lambda: call(Mesh.single(("data", "tensor")))


def of(call: Callable[[espalier.Engine], Any]) -> Callable[[], Any]:
    """A call that gets an engine."""
    return lambda: call(start())


X = torch.ones(4, 4, device="meta")
FIXED: dict[str, Any] = {"pipe": 1, "tensor": 1, "zero": 0, "recompute": "none"}
WRONG: list[tuple[Callable[[], Any], str]] = [
    # ---- meshes
    (lambda: Mesh.from_env(4), "axes is 4, expected names and sizes, such as"),  # type: ignore[arg-type]
    (lambda: Mesh.from_env({"data": 1.5}), "size of axis 'data' is 1.5, expected a whole number"),  # type: ignore[dict-item]
    (lambda: Mesh.dry({"data": "2"}), "size of axis 'data' is '2', expected a whole number"),  # type: ignore[dict-item]
    (lambda: Mesh.dry({"data": 10**9}), "up to 1,048,576 ranks are possible"),
    (lambda: Mesh.dry({"data": 2}, 1), "coordinate = 1 is not in a mesh"),  # type: ignore[arg-type]
    (lambda: Mesh.dry({1: 2}), "name of an axis is 1, expected a text"),  # type: ignore[dict-item]
    (lambda: Mesh.from_env({"data": 1}, "gpu"), "device type 'gpu': expected"),
    (lambda: Mesh.from_torch(5), "the mesh is 5, expected a torch DeviceMesh"),  # type: ignore[arg-type]
    (on(lambda mesh: mesh[0]), "is 0, expected names of its axes, among data, tensor"),
    (on(lambda mesh: mesh.axis(1.5)), "The axis is 1.5, expected one of data, tensor"),
    (on(lambda mesh: mesh.group("data")), "no process group along 'data': axes of one rank"),
    (lambda: espalier.spawn(None, {"data": 1}), "fn is None, expected a function of a mesh"),  # type: ignore[arg-type]
    (lambda: espalier.spawn(net, {"data": 0}), "a size is at least 1"),
    (lambda: espalier.spawn(net, {"data": 5000}), "5,000 processes on this machine are too many"),
    # ---- layouts and tensors
    (on(lambda mesh: Layout(mesh, [R, R], (4.5,))), r"The shape is \[4.5\], expected whole numbers"),
    (on(lambda mesh: Layout(mesh, [R, R], (-4,))), r"The shape is \[-4\], expected numbers of 0 or more"),
    (
        on(lambda mesh: Layout(mesh, R, (4,))),
        "placements is of type Replicate, expected a list, one for each",
    ),
    (on(lambda mesh: Layout(mesh, [S0, S0], (4,), order=3)), "order is 3, expected axes in the order"),
    (on(lambda mesh: espalier.distribute_tensor([1.0], mesh)), "of type list, expected a torch.Tensor"),
    (
        on(lambda mesh: espalier.distribute_tensor(T.to_sparse(), mesh)),
        r"sparse tensor .* Give tensor.to_dense",
    ),
    (on(lambda mesh: DTensor.from_local(5, mesh)), "from_local: the tensor is 5, expected a torch.Tensor"),
    (on(lambda mesh: DTensor.from_local(T, mesh, [R, Shard(3)])), "dim 3 is out of range for a tensor of 2"),
    (on(lambda mesh: espalier.zeros(2, device_mesh=mesh, device="cpu")), "no option device: expected dtype"),
    (on(lambda mesh: espalier.zeros(2.5, device_mesh=mesh)), r"The shape is \[2.5\], expected whole"),
    (on(lambda mesh: espalier.eye(2.5, device_mesh=mesh)), "expected whole numbers"),
    (
        on(lambda mesh: espalier.ones(2, device_mesh=mesh, dtype="float32")),
        "dtype is 'float32', expected a torch",
    ),
    (
        on(lambda mesh: espalier.randint(5, device_mesh=mesh)),
        r"randint\(\[low,\] high, size\) was given \[5\]",
    ),
    (on(lambda mesh: espalier.randint(0, 5, (3,), 7, device_mesh=mesh)), r"was given \[0, 5, \(3,\), 7\]"),
    (on(lambda mesh: espalier.randint(0, 1 << 64, (3,), device_mesh=mesh)), "more numbers than 2.63"),
    (on(lambda mesh: espalier.randperm(-3, device_mesh=mesh)), "n is -3, expected 0 or more"),
    (
        on(lambda mesh: espalier.rand(2, device_mesh=mesh, dtype=torch.int64)),
        "expected a floating-point or complex",
    ),
    (lambda: espalier.visualize_sharding(T), "of type Tensor, expected a DTensor, or a Layout"),  # type: ignore[arg-type]
    # ---- rules and styles
    (lambda: espalier.register_rule(), "was given no function"),
    (lambda: espalier.register_rule("add"), "the function is 'add', expected a function"),  # type: ignore[arg-type]
    (lambda: espalier.register_rule(net)(None), "the rule is None, expected a function"),  # type: ignore[arg-type]
    (
        lambda: espalier.register_sharding(torch.add),
        "expected an overload, such as torch.ops.aten.add.Tensor",
    ),
    (lambda: espalier.ColwiseParallel(input_layouts=5), "input_layouts is 5, expected Shard"),  # type: ignore[arg-type]
    (lambda: espalier.compile(5), "the model is 5, expected a module or a function"),
    # ---- plans
    (lambda: Plan({"data": 2}), r"takes values by their names, such as Plan\(data=2"),  # type: ignore[misc]
    (lambda: Plan(zero=True), "zero = True: expected 0, 1, 2 or 3"),
    (
        lambda: Plan(precision=16),
        "precision = 16: expected a word, such as 'bfloat16', or a table of compute",
    ),  # type: ignore[arg-type]
    (lambda: Plan(offload="host"), "offload = 'host': expected a table of parameters, gradients"),  # type: ignore[arg-type]
    (
        lambda: Plan(offload={"states": {"place": "host", "ratio": 2}}),
        "ratio = 2: expected .* to 1 or 'auto'",
    ),
    (lambda: Plan(tensor=2, sequence_parallel="yes"), "sequence_parallel = 'yes': expected .* or 'auto'$"),  # type: ignore[arg-type]
    (lambda: Plan(pipe=2, cuts="blocks.1"), "cuts = 'blocks.1': expected a list"),
    (lambda: Plan(pipe=2, cuts=[1]), "cuts.0 = 1: expected a valid string"),  # type: ignore[list-item]
    (lambda: Plan(fsdp=True), "fsdp = True: expected the number of ranks"),
    (lambda: Plan(bf16=1), "bf16 = 1: expected True or False"),  # type: ignore[arg-type]
    (lambda: Plan.from_dict(None), "The plan is None, expected a dict"),  # type: ignore[arg-type]
    (
        lambda: Plan.auto(net(), X, "h100-sxm"),
        r"0.weight is on cpu(.|\n)*copy.deepcopy\(model\).to\('meta'\)",
    ),
    (lambda: Plan.auto(meta(), X, 5), "the cluster is 5, expected the name of a cluster"),
    (lambda: Plan.auto(meta(), X, "h100-sxm", ranks=1.5), "ranks is 1.5, expected a whole number"),  # type: ignore[arg-type]
    (
        lambda: Plan.auto(meta(), X, "h100-sxm", ranks=2),
        r"^No plan uses 2 ranks(.|\n)*pass loss_fn= beside it",
    ),
    (lambda: espalier.dry_run(None, {}, X), "The model is None, expected a torch.nn.Module on the meta"),  # type: ignore[arg-type]
    (lambda: espalier.dry_run(meta(), {}, None), "The batch is None, expected the tensors of a global batch"),
    (lambda: espalier.dry_run(meta(), {}, X, optimizer=torch.optim.SGD), "SGD, expected one that is made"),  # type: ignore[arg-type]
    (lambda: espalier.explain_layouts(meta(), {}, None), "The batch is None, expected"),
    # ---- engines
    (lambda: start(loss_fn=nn.MSELoss), r"loss_fn is the class MSELoss, expected .* MSELoss\(\)"),
    (lambda: start(loss_fn="mse"), "loss_fn is 'mse', expected a function"),
    (lambda: start(layouts="column"), "layouts is 'column', expected a dict"),
    (lambda: start(count="mean"), "count is 'mean', expected a function of a micro-batch, or 'sum'"),
    (lambda: start(faults=False), r"faults is False, expected an espalier.Faults \(Faults\(watch=False\)"),
    (lambda: start(spikes="skip"), "spikes is 'skip', expected an espalier.Spikes"),
    (lambda: start(max_grad_norm=0), "max_grad_norm is 0, expected a number above 0, or None"),
    (lambda: espalier.prepare(torch.optim.SGD(net().parameters())), "the model is of type SGD"),  # type: ignore[arg-type]
    (lambda: espalier.prepare(net(), rows="mine"), "rows is 'mine', expected one of 'all', 'whole', 'own'"),  # type: ignore[arg-type]
    (of(lambda engine: engine.outputs(T, rows="mine")), "rows is 'mine', expected one of"),
    (of(lambda engine: engine.batch_rows(2.5)), "batch is 2.5, expected a whole number"),
    (of(lambda engine: engine.evaluate(None)), "is None, expected a batch, or several as a list"),
    (of(lambda engine: engine.generate(T, -1)), "max_new_tokens is -1, expected 0 or more"),
    (of(lambda engine: engine.full_parameter("0.weight")), "expected one of engine.parameters"),
    (of(lambda engine: engine.set_parameter(nn.Parameter(T), T)), "expected one of engine.parameters"),
    (of(lambda engine: engine.load_state_dict(None)), "the state dict is None, expected a dict"),
    (of(lambda engine: engine.export("x", dtype="bfloat16")), "dtype is 'bfloat16', expected a torch.dtype"),
    (of(lambda engine: engine.export("x", shard_gigabytes=0)), "shard_gigabytes is 0, expected"),
    (of(lambda engine: engine.loader([1], 2, seed="a")), "seed is 'a', expected a whole number"),
    (of(lambda engine: engine.save("x", keep=1.5)), "keep is 1.5, expected a whole number"),
    # ---- what watches
    (lambda: RunLog("x", None), "engine is None, expected an Engine: espalier.initialize gives one"),
    (
        of(lambda engine: RunLog("x", espalier.prepare(net()))),
        "expected an Engine: it is that model's .engine",
    ),
    (of(lambda engine: RunLog("x", engine, every=0)), "every is 0, expected 1 or more"),
    (of(lambda engine: RunLog("/dev/null", engine)), "/dev/null cannot be a run's folder"),
    (of(lambda engine: RunLog("x", engine, track=5)), "track is 5, expected one of tensorboard"),
    (lambda: Faults(limit="5"), "limit = '5': expected a number"),  # type: ignore[arg-type]
    (lambda: Faults(watch="no"), "watch = 'no': expected true or false"),  # type: ignore[arg-type]
    (lambda: Spikes(limit=1.5), "limit = 1.5: expected a whole number"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_a_wrong_argument_is_told_in_words(
    call: Callable[[], Any], words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_name_that_is_none_tells_which_is_meant() -> None:
    with pytest.raises(AttributeError) as caught:
        espalier.initialise  # type: ignore[attr-defined]  # noqa: B018
    assert caught.value.name == "initialise" and caught.value.obj is espalier  # by which Python finds it


def test_what_torch_takes_is_taken() -> None:
    mesh = Mesh.single(("data", "tensor"))
    assert espalier.zeros(size=(2, 3), device_mesh=mesh).shape == (2, 3)
    assert Plan(precision=torch.bfloat16) == Plan(precision="bfloat16")
    wide = espalier.randint(0, (1 << 63) - 1, (200,), device_mesh=mesh).full_tensor()
    assert wide.min() >= 0 and wide.max() > 1 << 62
    drawn = espalier.randn(4000, device_mesh=mesh, dtype=torch.complex128).full_tensor()
    assert 0.9 < drawn.abs().square().mean() < 1.1 and abs(drawn.real.square().mean() - 0.5) < 0.05
    assert abs((drawn.real * drawn.imag).mean()) < 0.05


def test_a_loss_function_and_several_optimizers_are_looked_ahead_with() -> None:
    """As a model that gives its loss, with one optimizer over all."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.net(x), y)

    with torch.device("meta"):
        inside = WithLoss()
    plan, beside = Plan(data=2, zero=1), meta()
    parts = [torch.optim.AdamW(part.parameters()) for part in beside]
    by_model = espalier.dry_run(inside, plan, (X, X), optimizer=torch.optim.AdamW(inside.parameters()))
    by_function = espalier.dry_run(beside, plan, (X, X), loss_fn=F.mse_loss, optimizer=parts)
    assert by_model.to_dict() == by_function.to_dict()
    assert Plan.auto(beside, (X, X), "h100-sxm", ranks=2, loss_fn=F.mse_loss, **FIXED).data == 2
    assert espalier.explain_layouts(beside, {"tensor": 2}, (X, X), loss_fn=F.mse_loss).rows
