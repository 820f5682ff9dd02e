"""The sanitizer: each kind of mistake, seeded, is caught with the operation, the line and the ranks."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import wrap_torch_function

import espalier
from espalier import DTensor, Mesh, Partial, Plan, Replicate, SanitizeError, Shard, distribute_tensor
from espalier.models import build
from espalier.tensor.observers import watchers
from espalier.tensor.sanitize import switch_on

R, P = Replicate(), Partial()
S = Shard
AXES = {"data": 2, "tensor": 2}
Ranks = Callable[..., list[Any]]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Said = tuple[str, str, str, list[str], list[int], int]


def caught(mistake: Callable[..., None]) -> Said:
    """What the sanitizer said of a mistake: text, op, where, axes, ranks; and the line that is marked."""
    mesh = Mesh.from_env(AXES)
    lines, start = inspect.getsourcelines(mistake)
    marked = next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
    before = set(watchers())  # of pipelines that others have left
    with pytest.raises(SanitizeError) as error, espalier.sanitize():
        mistake(mesh)
    assert not mesh.ledgers and before.issuperset(watchers())
    said = error.value
    return str(said), said.op, said.where, list(said.axes), list(said.ranks), start + marked


def check(found: Sequence[Said], op: str, axes: str, ranks: list[int], *words: str) -> None:
    """All ranks say the same, and the right thing."""
    assert len(found) == 4 and len({f[0] for f in found}) == 1, found
    text, said_op, where, said_axes, said_ranks, line = found[0]
    assert op in said_op, text
    assert where == f"tests/ranks/test_sanitize.py:{line}", text
    assert (said_axes, said_ranks) == (axes.split(), ranks), text
    for word in words:
        assert word in text, text


def run(rank: int, world: int, mistake: Any) -> Any:
    return caught(mistake)


# ---- values


def plain_operand(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    noise = torch.zeros(6, dtype=torch.float64)
    noise[3] = float(mesh.rank == 2)
    x.add(noise)  # here


def test_a_plain_tensor_that_differs(ranks: Ranks) -> None:
    check(
        ranks(4, run, plain_operand),
        "input 1 of add, a plain tensor",
        "data tensor",
        [2],
        "The first difference is at [3]: 0.0 on rank 0, 1.0 on rank 2",
        "Seed all ranks alike",
    )


def wrong_claim(mesh: Mesh) -> None:
    local = values(4, 6) + (mesh.coordinate[1] if mesh.coordinate[0] else 0)
    DTensor.from_local(local, mesh, [S(0), R]).sum()  # here


def test_from_local_with_a_wrong_claim(ranks: Ranks) -> None:
    check(ranks(4, run, wrong_claim), "from_local's part", "tensor", [3], "say Shard or Partial")


@wrap_torch_function(lambda x, rank: (x,))
def by_rank(x: torch.Tensor, rank: Any) -> torch.Tensor:
    return x + (rank() == 1)


def rank_in_a_function(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [R, R])
    y = x * 2
    z = by_rank(y, lambda: mesh.rank)  # here
    (z * 3).sum()


def test_a_result_that_differs(ranks: Ranks) -> None:
    found = ranks(4, run, rank_in_a_function)
    check(
        found, "the result of by_rank", "data tensor", [1], "at [0, 0]", "a number that depends on the rank"
    )


def written_part(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [R, S(1)])
    y = x * 2
    if mesh.rank >= 2:
        y.to_local()[1, 2] = 7.0
    y.exp()  # here


def test_a_local_part_changed_in_place(ranks: Ranks) -> None:
    found = ranks(4, run, written_part)
    check(found, "input 0 of exp", "data", [2], "at [1, 2]", "7.0 on rank 2", "changed in place")


@wrap_torch_function(lambda x: (x,))
def noisy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


def generators_out_of_step(mesh: Mesh) -> None:
    torch.manual_seed(0)
    x = distribute_tensor(values(4, 6), mesh, [R, R])
    if mesh.rank == 3:
        torch.rand(1)
    noisy(x)  # here


def test_a_random_function_without_a_rule(ranks: Ranks) -> None:
    found = ranks(4, run, generators_out_of_step)
    check(found, "the random state before noisy", "data tensor", [3], "a generator of its own")


def dropout_out_of_step(mesh: Mesh) -> None:
    torch.manual_seed(0)
    x = distribute_tensor(values(4, 6), mesh, [S(0), S(1)])
    F.dropout(x, 0.5)  # in step; that they have another seed each is no harm
    torch.manual_seed(mesh.rank)
    F.dropout(x, 0.5)
    torch.manual_seed(0)
    F.dropout(x, 0.5)
    if mesh.rank == 3:
        torch.rand(1)
    F.dropout(x, 0.5)  # here


def test_the_generator_counts_where_no_value_is_replicated(ranks: Ranks) -> None:
    found = ranks(4, run, dropout_out_of_step)
    check(found, "the random state before dropout", "data tensor", [3])


def parameter_that_differs(mesh: Mesh) -> None:
    layer = torch.nn.Linear(6, 4, bias=False, dtype=torch.float64)
    torch.manual_seed(mesh.rank)
    local = torch.randn(4, 6, dtype=torch.float64)
    whole = distribute_tensor(local, mesh, [R, R])
    layer.weight = torch.nn.Parameter(whole)
    with torch.no_grad():
        layer.weight.data.to_local().copy_(local)
    layer(distribute_tensor(values(8, 6), mesh, [S(0), R]))  # here


def test_a_parameter_at_its_first_use(ranks: Ranks) -> None:
    check(
        ranks(4, run, parameter_that_differs),
        "input 1 of linear",
        "data tensor",
        [1, 2, 3],
        "Layout([4, 6] data2:R",
    )


# ---- gradients


def hook_on_one_rank(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [R, R]).requires_grad_()
    y = x.sin()  # here
    if mesh.rank == 1:
        y.register_hook(lambda grad: grad * 2)
    y.exp().sum().backward()


def test_a_hook_on_one_rank(ranks: Ranks) -> None:
    found = ranks(4, run, hook_on_one_rank)
    check(found, "the gradient of the result of sin", "data tensor", [1], "a hook changes the gradient")


def hook_on_a_leaf(mesh: Mesh) -> None:
    w = distribute_tensor(values(6), mesh, [R, R]).requires_grad_()
    optimizer = torch.optim.SGD([w], 0.1)
    if mesh.rank == 0:
        w.register_hook(lambda grad: grad * 2)
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    (x * w).sum().backward()  # here
    optimizer.step()


def test_a_hook_on_a_parameter_of_one_rank(ranks: Ranks) -> None:
    found = ranks(4, run, hook_on_a_leaf)
    check(found, "the gradient of input 1 of mul", "data tensor", [0])


# ---- the sequence


def skipped(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    if mesh.rank != 2:
        x.full_tensor()
    (x * 2).sum().item()  # here


def test_a_skipped_collective(ranks: Ranks) -> None:
    check(
        ranks(4, run, skipped),
        "all_reduce along 'data' in DTensor.full_tensor",
        "",
        [2],
        "ranks 0, 1, 3: all_gather of [4, 6] float64 along 'data' in DTensor.full_tensor",
        "out of step",
    )


def left_out_at_the_end(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    if mesh.rank != 0:
        x.sum().full_tensor()  # here


def test_a_collective_that_one_rank_leaves_out_at_the_end(ranks: Ranks) -> None:
    found = ranks(4, run, left_out_at_the_end)
    assert len({f[0] for f in found}) == 1
    assert found[0][4] == [0] and "rank 0: the end of sanitize()" in found[0][0]


def other_shapes(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    y = x[:, : 3 + (mesh.rank == 1)]  # here
    y.sum().item()


def test_shapes_that_depend_on_the_rank(ranks: Ranks) -> None:
    check(ranks(4, run, other_shapes), "the call of __getitem__", "", [1], "slice(None, 4, None)")


def other_numbers(mesh: Mesh) -> None:
    x = distribute_tensor(values(4, 6), mesh, [S(0), S(1)])
    x.mul(1.0 + mesh.coordinate[0])  # here


def test_arguments_that_depend_on_the_rank(ranks: Ranks) -> None:
    check(ranks(4, run, other_numbers), "the call of mul", "", [2, 3], "1.0", "2.0")


def absent(rank: int, world: int) -> tuple[str, list[int], float]:
    mesh = Mesh.from_env(AXES)
    x = distribute_tensor(values(4, 6), mesh, [S(0), R])
    began = time.monotonic()
    with pytest.raises((SanitizeError, RuntimeError)) as error, espalier.sanitize(limit=5):
        x.sum().item()
        if rank == 1:
            raise RuntimeError("of its own")
        x.exp().full_tensor()
    took = time.monotonic() - began
    return str(error.value), list(getattr(error.value, "ranks", ())), took


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    said = ranks(4, absent)
    assert said[1][0] == "of its own"
    for text, missing, took in (said[0], said[2], said[3]):
        assert missing == [1] and took < 30
        assert "rank 1 did not come (the limit is 5 seconds)" in text
        assert "left with RuntimeError('of its own')" in text and "all_gather of [4, 6]" in text


# ---- what is right passes, and changes nothing


def harmless(rank: int, world: int) -> None:
    mesh = Mesh.from_env(AXES)
    with espalier.sanitize():
        x = distribute_tensor(values(5, 6), mesh, [S(0), R]).requires_grad_()
        w = espalier.empty(6, device_mesh=mesh, dtype=torch.float64)
        w.fill_(2.0)
        # parts of uneven sizes, and an axis of one rank
        DTensor.from_local(x.detach().to_local().clone(), mesh, [S(0), R], shape=(5, 6)).sum().item()
        distribute_tensor(values(5, 6), Mesh.from_env({"data": 1, "tensor": 4}), [R, S(1)]).full_tensor()
        loss = (x * w).logsumexp(1).sum()
        total = loss.full_tensor()
        if rank == 0:
            # what communicates with nobody may be done alone
            loss.detach().clone()
            (w.detach() * 3).tolist()
            str(total)
        loss.backward()
        inner = x.grad * 2  # type: ignore[operator]
        inner.full_tensor()
        with torch.inference_mode():
            (w * 2).sum().item()
        with torch.random.fork_rng():
            F.dropout(x, 0.3)


def test_what_one_rank_does_by_itself_is_let_be(ranks: Ranks) -> None:
    ranks(4, harmless)


def tolerated(rank: int, world: int) -> list[str]:
    mesh = Mesh.from_env(AXES)
    said = []
    for size, tolerance in ((1e-9, 1e-6), (1e-9, 0.0), (1e-3, 1e-6)):
        x = distribute_tensor(values(4, 6), mesh, [S(0), R])
        try:
            with espalier.sanitize(tolerance=tolerance):
                x + (torch.ones(6, dtype=torch.float64) + size * (rank == 1))
            said.append("")
        except SanitizeError as error:
            said.append(str(error))
    return said


def test_tolerance(ranks: Ranks) -> None:
    for small, exact, large in ranks(4, tolerated):
        assert small == "" and "rank 1 differs" in exact and "rank 1 differs" in large


def train(mesh: Mesh, clean: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "max_positions": 12, "layers": 2, "hidden": 16, "heads": 4, "dropout": 0.1}
    model = build("gpt", sizes).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    engine = espalier.initialize(model, optimizer, Plan(**AXES), mesh=mesh, max_grad_norm=1.0)
    losses = []
    with espalier.ledger(mesh) as book:
        for step in range(2):
            tokens = torch.randint(0, 31, (5, 9), generator=torch.Generator().manual_seed(step))
            losses.append(engine.train_step({"input_ids": tokens, "labels": tokens}).item())
    return losses, engine.full_state_dict(), book


def clean_program(rank: int, world: int) -> None:
    mesh = Mesh.from_env(AXES)
    plain = train(mesh, False)
    with espalier.sanitize():
        checked = train(mesh, True)
    assert checked[0] == plain[0]
    assert all(torch.equal(x, plain[1][name]) for name, x in checked[1].items())
    assert checked[2] == plain[2] and plain[2].entries, "its own traffic stands in no ledger"
    assert not any(w.passes for w in watchers())


def test_a_clean_program_passes_with_the_same_bits(ranks: Ranks) -> None:
    ranks(4, clean_program)


def wrong_batch(mesh: Mesh) -> None:
    model = build("gpt", {"vocab_size": 31, "max_positions": 12, "layers": 1, "hidden": 16, "heads": 4})
    engine = espalier.initialize(model, None, Plan(**AXES), mesh=mesh)
    tokens = torch.full((4, 9), mesh.rank)
    engine({"input_ids": tokens, "labels": tokens})  # here


def test_a_global_batch_that_each_rank_loaded_for_itself(ranks: Ranks) -> None:
    text, op, where, *_ = ranks(4, run, wrong_batch)[0]
    assert "the global batch given to the engine" in op and "test_sanitize.py" in where, text


PROGRAM = """
import torch
import espalier
from espalier.tensor.observers import watchers

mesh = espalier.Mesh.from_env({"data": 2})
x = espalier.ones(4, device_mesh=mesh)
x.sum().item()
print("watched by", len(watchers()))
x.mul(torch.ones(4) + mesh.rank)
(x * 2).redistribute(placements=[espalier.Shard(0)]).sum().item()
"""


def test_the_switch_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)

    command = [sys.executable, "-m", "espalier", "run", "-n", "2", str(file)]
    env = {**os.environ, "ESPALIER_SANITIZE": "1"}
    on = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert on.returncode and "watched by 1" in on.stdout
    assert "input 1 of mul, a plain tensor," in on.stdout + on.stderr
    assert "program.py:10) must be equal" in on.stdout + on.stderr
    with pytest.raises(ValueError, match="ESPALIER_SANITIZE=limit=soon: 'limit=soon' is not understood"):
        switch_on("limit=soon")
