"""Dry runs: any rank by name, as JSON, in a time that the data axis does not change."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import espalier
from espalier.comm.dry import values_of, without_data
from espalier.models import GPT, GPTConfig
from espalier.tensor.dry_runs import CostMode, Recalled
from espalier.torch_private import FakeTensor, FakeTensorMode


class Calls(TorchDispatchMode):
    """Counts the operations that reach torch, and those of them that do more than take memory."""

    number = computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        self.computed += "empty" not in func.name()
        return func(*args, **(kwargs or {}))


def run(plan: dict[str, Any], coordinate: Any = None, layers: int = 2) -> espalier.DryReport:
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=131, max_positions=16, layers=layers, hidden=48, heads=4))
        x = torch.empty(plan.get("data", 1) * plan.get("accumulate", 1), 16, dtype=torch.int64)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = {"input_ids": x, "labels": x}
    return espalier.dry_run(net, plan, batch, optimizer=optimizer, coordinate=coordinate)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_data_axis_costs_no_time(zero: int, precision: str) -> None:
    found = []
    for n in (4, 96, 1000):
        with Calls() as calls:
            report = run({"data": n, "zero": zero, "precision": precision})
        found.append(calls.number)
        each = sum(bytes for op, axis, bytes in report.ledger.entries if op == "reduce_scatter")
        assert each >= (n - 1) / n * 2 * report.parameters
    # where a bias has fewer elements than there are ranks, some of it lies on none
    assert max(found) <= 1.3 * min(found)


def test_a_rank_is_named() -> None:
    plan = {"pipe": 2, "data": 2, "accumulate": 2}
    by_name, by_place = run(plan, {"pipe": 1}), run(plan, (1, 0, 0))
    assert by_name.to_dict() == by_place.to_dict()
    assert by_name.rank == {"pipe": 1, "data": 0, "tensor": 0}
    assert run(plan).parameter_bytes != by_name.parameter_bytes
    assert "rank pipe=1:" in str(by_name)
    with pytest.raises(ValueError, match=r"There is no rank pipe=2: this plan's mesh has pipe 0 to 1, data"):
        run(plan, {"pipe": 2})
    with pytest.raises(ValueError, match="no rank row=0"):
        run(plan, {"row": 0})


def test_a_report_as_json() -> None:
    report = run({"pipe": 2, "data": 2, "accumulate": 2}, {"pipe": 1})
    told = json.loads(json.dumps(report.to_dict()))
    assert told["peak_bytes"] == report.peak_bytes and told["rank"] == report.rank
    sent: dict[str, int] = {}
    for row in told["sent"]:
        sent[row["axis"]] = sent.get(row["axis"], 0) + row["bytes"]
    assert sent == report.ledger.by_axis()


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def made_of(empty: Callable[..., torch.Tensor] = empty) -> list[torch.Tensor]:
    """Results of operations of every kind, and gradients."""
    x, w = empty(4, 6).requires_grad_(), empty(5, 6).requires_grad_()
    cut = x.t()[1:5].expand(3, 4, 4)
    out = F.gelu(F.layer_norm(x, (6,))) @ w.t()
    values, places = out.topk(2)
    changed = values.clone().mul_(2).t().softmax(0)
    found = [out, values, places, changed, cut, cut + 1, cut * True, cut * 1, x.sum(0, dtype=torch.float64)]
    found += [empty(0, 3) + 1, *out.split(2), *F.linear(x, w, w[:, 0]).unbind()]
    found += torch.autograd.grad(changed.sum() + out.square().mean(), [x, w])
    return found


def alike(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for x, y in zip(found, right, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


def test_what_was_found_out_of_meta_tensors_is_recalled() -> None:
    """The same tensors and FLOPs as torch has, with fewer calls."""
    counter = FlopCounterMode(display=False)
    with Calls() as plainly, counter:
        right = made_of()
    with Calls() as reached, Recalled() as work:
        for _ in range(2):
            reached.computed = work.flops = 0
            found = made_of()
            assert work.flops == counter.get_total_flops()
            alike(found, right)
            assert found[4].untyped_storage()._cdata != found[5].untyped_storage()._cdata
    assert reached.computed < plainly.computed - 10


def test_of_writes_to_each_number_nothing_is_asked() -> None:
    """An update of parameters; where numbers are of other shapes torch says what is wrong."""
    x, other, row = empty(4, 6), empty(4, 6), empty(6)
    with Calls() as reached, Recalled():
        assert x.lerp_(other, 0.1).mul_(2).addcdiv_(other, other, value=-0.1) is x and reached.number == 0
        assert x.add_(row) is x and reached.number == 1
        with pytest.raises(RuntimeError, match="shape"):
            row.add_(x)


def test_what_was_found_out_of_fake_tensors_is_recalled() -> None:
    """A trace's tensors are those that torch's fakes are; what they take is counted alike."""
    fake, views = FakeTensorMode(allow_non_fake_inputs=True), list[Any]()

    def empty(*shape: int) -> torch.Tensor:
        with fake:
            return torch.empty(shape, dtype=torch.float32)

    def made() -> list[torch.Tensor]:
        images = empty(2, 8, 8, 3).permute(0, 3, 1, 2), empty(4, 3, 3, 3)
        whole, held = empty(3).to(torch.int64), empty(4, 6)[1:]
        for view in (held.t()[2:], held.unflatten(1, (2, -1)), held.view(torch.int32), held.detach()):
            assert view.untyped_storage()._cdata == held.untyped_storage()._cdata
            views.append((view.storage_offset(), tuple(view.shape), view.dtype))
        return [*made_of(empty), F.conv2d(*images), whole / 2, empty(2) * torch.ones(2)]

    for default in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        try:
            right, work = made(), []
            for _ in range(2):
                with CostMode() as mode:
                    found = made()
                alike(found, right)
                assert all(type(x) is FakeTensor and x.fake_mode is fake for x in found)
                work.append(mode.total)
        finally:
            torch.set_default_dtype(torch.float32)
        assert work[0] == work[1] and work[0].flops > 0 and found[-2].dtype is default
    of = [(8, (4, 3), torch.float32), (6, (3, 2, 3), torch.float32), (6, (3, 6), torch.int32)]
    assert views == [*of, (6, (3, 6), torch.float32)] * 9


def test_of_fake_tensors_beside_others_is_recalled_too() -> None:
    """As of views that torch does not call so, and of copies in another order: it is not asked again."""

    class Asked(FakeTensorMode):
        asked = 0

        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return super().dispatch(*args, **kwargs)

    fake = Asked(allow_non_fake_inputs=True)
    with fake:
        x, table = torch.empty(2, 3, 4), torch.empty(7, 4)
    ids, scale = torch.arange(6).view(2, 3), torch.ones(4, dtype=torch.float64)

    def made() -> list[torch.Tensor]:
        with torch.no_grad():
            return [F.linear(x, table), F.embedding(ids, table), scale * x, x.mT.contiguous(), x + scale[0]]

    right = made()
    with CostMode():
        made()
        fake.asked = 0
        found = made()
    alike(found, right)
    assert all(type(y) is FakeTensor and y.fake_mode is fake for y in found) and fake.asked == 0


def test_a_value_that_a_model_asks_for_is_told_with_its_line() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, device="meta")

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sum() if mask.all() else self.linear(x).mean()

    batch = {"x": torch.empty(2, 4, device="meta"), "mask": torch.empty(2, 4, device="meta")}
    line = inspect.getsourcelines(Asks.forward)[1] + 1
    for plan in ({}, {"data": 2}):
        told = rf"has no values .* and \S*test_dry.py:{line} asks for one. .* not as meta tensors"
        with pytest.raises(ValueError, match=told):
            espalier.dry_run(Asks(), plan, batch)


def test_values_of_masks_are_followed() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    unknown = torch.empty(2, 3, dtype=torch.int64, device="meta")
    bare = without_data({"mask": mask, "x": torch.ones(2), "ids": unknown})
    assert bare["mask"].is_meta and values_of(bare["x"]) is None and values_of(unknown) is None
    with Recalled():
        known = bare["mask"]
        views = known[:, 1:].t()
        assert torch.equal(values_of(views), mask[:, 1:].t())
        assert not known.all() and known[0, :2].all() and int(known.sum()) == 3
        assert known.cumsum(-1)[0].max().item() == 2 and torch.arange(4, device="meta")[-1].item() == 3
        assert known.nonzero().shape == (3, 2), "a shape that hangs on values"
        known[0, 2] = 1  # is written through every view
        assert int(known.sum()) == 4 and int(views.sum()) == 2
        added = known + unknown
        assert values_of(added) is None and values_of(known.float()) is None
        with pytest.raises(ValueError, match="has no values"):
            bool(added.any())
        known.copy_(unknown)
        assert values_of(known) is None and values_of(views) is None, "nobody knows what is there now"
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0]], "what was given is as it was"
    real = torch.zeros(2, dtype=torch.int64)
    with Recalled():
        real += 1
    assert real.tolist() == [1, 1], "what has data is written once"


class Branches(nn.Module):
    """Takes another way where all is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y if mask.all() else self.more(y) * mask[..., None]).sum()


def test_a_program_takes_the_way_that_its_mask_says() -> None:
    with torch.device("meta"):
        net, x = Branches(), torch.empty(4, 3, 4)
    work = []
    for mask in (torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.int64).tril(-1)):
        for plan in ({"data": 2}, {"data": 2, "accumulate": 2}, {"tensor": 2}):
            given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
            work.append(espalier.dry_run(net, plan, {"x": x, "mask": mask}, **given).flops)
    one, two = 2 * 12 * 16, 2 * 12 * 16 * 2
    assert work[:2] == [one, one] and work[3:5] == [two * 5 // 4] * 2


@pytest.mark.parametrize("plan", [{"data": 2}, {"data": 3, "zero": 3}, {"context": 2}], ids=str)
def test_labels_with_values_go_into_stages(plan: dict[str, Any]) -> None:
    """A trace sees all rows, where a rank has some of them, with the values of these."""
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=31, max_positions=8, layers=2, hidden=12, heads=2))
    ledgers = []
    for device in ("cpu", "meta"):
        ids = torch.ones(8, 8, dtype=torch.int64, device=device)
        given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
        batch = {"input_ids": ids.to("meta"), "labels": ids}
        found = espalier.dry_run(net, {**plan, "pipe": 2, "accumulate": 2}, batch, **given)
        ledgers.append(found.ledger.entries)
    assert ledgers[0] == ledgers[1]


def test_a_plain_tensor_hangs_on_what_is_written_to_it() -> None:
    mesh = espalier.Mesh.dry({"data": 2})
    h = espalier.distribute_tensor(torch.ones(4, 3), mesh, [espalier.Shard(0)]).requires_grad_()
    beside = torch.zeros(4, 6)
    beside[:, :3] = h
    beside[:, 3:].copy_(h)
    assert beside.add_(h.mean()) is beside and beside.requires_grad
    beside.sum().backward()
    assert h.grad is not None and h.grad.shape == h.shape
    masked = torch.zeros(4, 3)
    with pytest.warns(espalier.GatherWarning):
        masked[torch.ones(4, dtype=torch.bool)] = h
    assert masked.requires_grad


def test_what_stages_share_may_be_frozen() -> None:
    """A dry run takes it that another stage's copy has a gradient: not where none can have one."""
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=32, max_positions=8, layers=2, hidden=16, heads=2, tied=True))
        x = torch.empty(4, 8, dtype=torch.int64)
    net.embed.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad])
    plan = espalier.Plan(data=2, pipe=2, accumulate=2)
    report = espalier.dry_run(net, plan, {"input_ids": x, "labels": x}, optimizer=optimizer)
    assert report.ledger.by_op()["pipe", "send"][0] > 0
