"""Errors reach other processes whole: what raises them (a pool of workers, a launcher) may pickle them."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.comm.control import Absent
from espalier.engine.norm import SpikeError
from espalier.engine.update import check_optimizer
from espalier.mesh.launch import LaunchError
from espalier.models import ConfigError
from espalier.parallel.pipeline.record import ValuesError
from espalier.parallel.plan import PlanError
from espalier.parallel.schedules.simulate import ScheduleError
from espalier.tensor.compare import SanitizeError
from espalier.texts import MISSING, Mistake, MistakeError
from espalier.train.job import JobError

EXAMPLES = [
    Absent([(3, "loads"), (4, "")], 4, "rank 1 did not come"),
    SpikeError("a spike", 7, True, ["head.weight"]),
    ValuesError("encoder", "it decides by values"),
    LaunchError("rank 1 failed", 1, -9),
    MistakeError("Spikes", [Mistake("limit", 0, "expected at least 1")]),
    ConfigError("GPT2Config", ["heads = 3: expected a divisor of hidden"]),
    ScheduleError("mine", [f"rank {i} waits for ever" for i in range(30)]),
    PlanError([("zero", 4, "expected 0 to 3"), ("datta", 2, "unknown key; did you mean data?")]),
    SanitizeError("ranks differ", "aten.add", "train.py:3", ["data"], [1]),
    JobError("job.toml", [Mistake("train.steps", MISSING, "is missing"), Mistake("a", 1, "no")], ["a"]),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_is_the_same_when_pickled(error: BaseException) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_all_with_a_constructor_of_their_own_are_here() -> None:
    found = set()
    for module in pkgutil.walk_packages(espalier.__path__, "espalier."):
        if module.name != "espalier.__main__":
            try:
                members = vars(importlib.import_module(module.name)).values()
            except ImportError as missing:  # of a package that need not be installed
                package = str(missing.name).partition(".")[0]
                assert package in ("deepspeed", "lightning_fabric", "pytorch_lightning", "ray")
                continue
            found |= {x for x in members if inspect.isclass(x) and issubclass(x, Exception)}
    own = {x for x in found if x.__module__.startswith("espalier") and "__init__" in vars(x)}
    assert own <= {type(error) for error in EXAMPLES}


def test_a_start_and_a_loss_of_another_kind_are_told_in_words() -> None:
    """What was given, what was expected, what to do."""
    net = nn.Linear(2, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = espalier.Plan()

    def refused(kind: type[Exception], words: str, *given: Any) -> None:
        with pytest.raises(kind, match=words):
            espalier.initialize(*given)

    refused(TypeError, "the plan is 'fsdp', expected a Plan or a dict", net, sgd, "fsdp")
    refused(TypeError, "the model is of type SGD, expected a torch.nn.Module", sgd, net, plan)
    refused(TypeError, "The optimizer is SGD, expected one that is made", net, torch.optim.SGD, plan)
    both = torch.optim.SGD([*net.parameters(), *nn.Linear(2, 2).parameters()])
    with pytest.warns(UserWarning, match=r"does not hold 0.weight, 0.bias of the model, but 2 tensor"):
        check_optimizer(both, nn.Sequential(nn.Linear(2, 2), net), plan)
    x, y = torch.zeros(4, 2), torch.zeros(4, 2)
    engine = espalier.initialize(net, sgd, plan)
    with pytest.raises(TypeError) as caught:
        engine((x, y))
    assert "wants loss_fn= beside it" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match=r"shape \[4, 2\], expected one number(.|\n)*engine.outputs"):
        engine(x)
    loss = engine.outputs(x).mean()
    for given, kind, words in (
        (0.5, TypeError, "was given float"),
        (loss.detach(), ValueError, "no gradient leads from this loss"),
        (engine.outputs(x), ValueError, "expected one number"),
    ):
        with pytest.raises(kind, match=words):
            engine.backward(given)
    engine.backward(loss)
