"""``espalier verify`` on the jobs that are shipped: each plan against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from espalier.comm import Pending
from espalier.comm.backend import Summing
from espalier.mesh import Mesh
from espalier.train.job import Job
from espalier.train.verify import Double, verify

PLANS = {"data 4": (4, 1), "tensor 2": (1, 2), "tensor 4": (1, 4), "data 2 × tensor 2": (2, 2)}


def compared(rank: int, world: int, name: str, data: int, tensor: int) -> Any:
    job = Job.load(name, [f"plan.data={data}", f"plan.tensor={tensor}"])
    found = verify(job)
    if found is None:
        return None
    assert len(found.steps) >= 3
    return found.passed, found.worst


def check(ranks: Any, name: str, plan: str) -> None:
    data, tensor = PLANS[plan]
    passed, worst = ranks(data * tensor, compared, name, data, tensor, timeout=240)[0]
    assert passed and worst < 1e-9, f"{name}, {plan}: largest difference {worst:.2e}"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt", "gpt2"])
def test_plan_equals_one_process(ranks: Any, name: str, plan: str) -> None:
    check(ranks, name, plan)


def accumulated(rank: int, world: int, name: str) -> Any:
    plan = ["plan.data=2", "plan.tensor=2", "plan.zero=3", "plan.accumulate=3", "plan.recompute=selective"]
    found = verify(Job.load(name, [*plan, "verify.batch_size=5"]))
    return None if found is None else (found.passed, found.worst)


# Hugging Face's losses are called by helpers of its own
@pytest.mark.filterwarnings("ignore:A global batch of")
@pytest.mark.parametrize("name", ["gpt", "hf-llama"])
def test_accumulation_equals_one_process(ranks: Any, name: str) -> None:
    pytest.importorskip("transformers")
    passed, worst = ranks(4, accumulated, name, timeout=240)[0]
    assert passed and worst < 1e-9


def uneven(rank: int, world: int) -> tuple[bool, ...]:
    job = Job.load("gpt")
    hidden, heads, vocabulary = (job.raw["model"][k] for k in ("hidden", "heads", "vocab_size"))
    return tuple(n % 4 != 0 for n in (hidden, heads, vocabulary))


def test_the_jobs_sizes_do_not_divide_by_four(ranks: Any) -> None:
    assert all(ranks(1, uneven)[0])


def broken(rank: int, world: int) -> Any:
    """A plan whose gradients are not reduced must fail."""
    from espalier.parallel.data import gradients

    kept = gradients.start_sum, gradients.start_total
    try:
        gradients.start_sum, gradients.start_total = _forgetful, lambda *args: None
        found = verify(Job.load("gpt", ["plan.data=2", "plan.tensor=1"]))
    finally:
        gradients.start_sum, gradients.start_total = kept
    return None if found is None else found.passed


def _forgetful(rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
    """A sum of what is here alone."""
    return Summing([rows[mesh.coordinate[axis]]], Pending())


def test_verify_can_fail(ranks: Any) -> None:
    assert ranks(2, broken)[0] is False


def test_losses_keep_their_weights_while_nothing_is_cast_down() -> None:
    x, y, weights = torch.rand(3, 4, 2).double()
    expected = F.l1_loss(x, y, weight=weights)
    with Double():
        assert torch.equal(F.l1_loss(x, y, weight=weights), expected)
