"""Every argument of torch's own is taken here, at its place, and the text says what becomes of it."""

from __future__ import annotations

import inspect
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import fsdp, pipelining
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Shard
from torch.nn import parallel

from espalier.compat import torch as here

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch.jit, by its own import
    from torch.distributed.optim import ZeroRedundancyOptimizer

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="the arguments are those of torch 2.13")
SAME = {
    here.DataParallel: parallel.DataParallel,
    here.DistributedDataParallel: parallel.DistributedDataParallel,
    here.FullyShardedDataParallel: fsdp.FullyShardedDataParallel,
    here.fully_shard: fsdp.fully_shard,
    here.ZeroRedundancyOptimizer: ZeroRedundancyOptimizer,
    here.pipeline: pipelining.pipeline,
    here.PipelineStage: pipelining.PipelineStage,
    **{
        getattr(here.pipelining, name): getattr(schedules, name)
        for name in here.pipelining.__all__
        if name.startswith("Schedule")
    },
}


# of a torch to come: behind those of the one that is here
LATER = ["lazy_bucket_allocation", "max_active_stages", "unshard_lookahead"]


def said(of: Any) -> tuple[str, str]:
    """The text of a class and of what it is made of, and their code."""
    kinds = [kind for kind in of.__mro__ if "compat" in kind.__module__] if isinstance(of, type) else [of]
    texts = (" ".join(f(kind) or "" for kind in kinds) for f in (inspect.getdoc, inspect.getsource))
    text, code = (" ".join(x.split()) for x in texts)
    return text, code


@pytest.mark.parametrize("ours", SAME, ids=lambda kind: kind.__name__)
def test_arguments(ours: Any) -> None:
    """The same names, in the same order; of each the text says what becomes of it."""
    theirs = [*inspect.signature(SAME[ours]).parameters]
    takes = [*inspect.signature(ours).parameters.values()]
    given = [p.name for p in takes if p.kind is not p.KEYWORD_ONLY or p.name in theirs]
    assert given[: len(theirs)] == theirs and all(name in LATER for name in given[len(theirs) :])
    text, code = said(ours)
    unsaid = [n for n in given if f'("{n}"' not in code and not re.search(rf"\b{n}(, \w+)*: ", text)]
    assert [n for n in unsaid if n not in ("module", "params", "submodule")] == []


@pytest.mark.parametrize("name", ["FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"])
def test_methods(name: str) -> None:
    """Each public one is here, with the same arguments in the same order."""
    theirs = getattr(fsdp, name, None) or getattr(parallel, name)
    ours = getattr(here.fsdp, name, None) or getattr(here, name)
    inner = {"scatter", "gather", "to_kwargs", "main_hook", "post_hook", "create", "broadcast_buffers"}
    inner |= {"join_hook", "join_device", "join_process_group", "summon_full_params", "forward"}
    for method in vars(theirs):
        if method.startswith("_") or method in inner or not callable(getattr(theirs, method)):
            continue
        own = inspect.getattr_static(ours, method, None)
        assert own is not None, method
        takes = [*inspect.signature(getattr(ours, method)).parameters.values()]
        if not any(p.kind is p.VAR_POSITIONAL for p in takes):
            assert [p.name for p in takes] == [*inspect.signature(getattr(theirs, method)).parameters], method


def test_what_is_refused() -> None:
    """In words."""
    with pytest.raises(ValueError, match="dw_builder"):
        here.PipelineStage(torch.nn.Linear(2, 2), 0, 2, dw_builder=print)
    stages = [here.PipelineStage(torch.nn.Linear(2, 2), i, 2) for i in range(2)]
    with pytest.raises(ValueError, match="autograd's"):
        here.pipelining.ScheduleLoopedBFS(stages, 2, backward_requires_autograd=False)
    with pytest.raises(ValueError, match="say where by split_spec"):
        here.pipeline(torch.nn.Linear(2, 2), split_policy=print)
    with pytest.raises(ValueError, match=r"shard_placement_fn(.|\n)*on one mesh"):
        here.fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=lambda p: "elsewhere")
    here.fully_shard(torch.nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    here.fsdp.share_comm_ctx([])
    with pytest.raises(ValueError, match="a number that divides that of the ranks"):
        here.fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=0)
    here.fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=1)


def test_an_optimizer_of_zero_is_known_as_one() -> None:
    """By isinstance, as programs ask before they consolidate; others are not."""
    net = torch.nn.Linear(2, 2)
    optimizer = here.ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    assert isinstance(optimizer, here.ZeroRedundancyOptimizer) and isinstance(optimizer, torch.optim.SGD)
    assert not isinstance(torch.optim.SGD(net.parameters()), here.ZeroRedundancyOptimizer)


class Far(torch.Tensor):
    """Of a device that is not the CPU."""

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def test_state_dicts_on_the_host() -> None:
    """Where the configuration of either kind says so."""
    model = here.FullyShardedDataParallel(torch.nn.Linear(2, 2))
    state = {"state": {"weight": {"exp_avg": torch.ones(2).as_subclass(Far)}}, "param_groups": [{"lr": 0.1}]}
    for config in (fsdp.FullStateDictConfig(True), fsdp.FullOptimStateDictConfig(True)):
        there = model._as_said(state, config)
        assert type(there["state"]["weight"]["exp_avg"]) is torch.Tensor
        assert there["param_groups"] == state["param_groups"]
    assert type(model._as_said(state, fsdp.FullStateDictConfig())["state"]["weight"]["exp_avg"]) is Far


def policy(**said: Any) -> Any:
    """Of mixed precision, as torch 2.15 has it."""
    known = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype", "param_dtype_override_fn"))
    return SimpleNamespace(**{**known, "param_dtype": torch.bfloat16, **said})


def test_policies_of_torch_2_15() -> None:
    """Gradients are summed in the parameters' own dtype, if nothing is said; all have one to compute in."""

    def sums(net: torch.nn.Module, **said: Any) -> Any:
        return here.fully_shard(net, mp_policy=policy(**said))._fully.said.get("precision", {}).get("reduce")

    assert sums(torch.nn.Linear(2, 2)) == "float32"
    assert sums(torch.nn.Linear(2, 2), reduce_dtype=torch.bfloat16) == "bfloat16"
    assert sums(torch.nn.Linear(2, 2).bfloat16()) is None
    assert sums(torch.nn.Linear(2, 2), param_dtype=None, param_dtype_override_fn=lambda p: p.dtype) is None
    assert sums(torch.nn.Linear(2, 2), param_dtype_override_fn=lambda p: torch.bfloat16) == "float32"
    with pytest.raises(ValueError, match=r"param_dtype_override_fn(.|\n)*float32(.|\n)*have one dtype"):
        sums(torch.nn.Linear(2, 2), param_dtype_override_fn=lambda p: p.dtype)


def test_gradients_are_there_behind_a_backward_pass() -> None:
    """``finalize_backward`` of torch 2.15 has nothing to do but where it is called too early."""
    model = here.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.require_manual_backward_finalization = True
    assert model.should_finalize_after_backward
    x = torch.ones(1, 2, requires_grad=True)
    x.register_hook(lambda grad: model.finalize_backward())
    with pytest.raises(ValueError, match=r"finalize_backward(.|\n)*behind loss.backward"):
        model(x).sum().backward()
    model.finalize_backward()
