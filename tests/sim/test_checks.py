"""What ``make gpu`` looks at, tried on the simulated device: the checks themselves run, and can fail."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier.mesh.launch import LaunchError
from tests.sim.transport import Shared

TOOL = Path(__file__).parents[2] / "tools" / "gpu_checks.py"
SMALL = {"vocab_size": 64, "max_positions": 16, "hidden": 32, "heads": 4, "layers": 2}


def tool() -> Any:
    """The checks, of small models."""
    spec = importlib.util.spec_from_file_location("gpu_checks", TOOL)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SIZES.update(SMALL)
    module.BIG.update(SMALL, vocab_size=2048, max_positions=64, hidden=128)
    return module


def looked(shared: Shared, rank: int, world: int, folder: str) -> dict[str, tuple[bool, str]]:
    """Whether each check of one rank holds here, and what it prints."""
    checks = tool()
    for name in ("Adam", "SGD", "Adagrad"):
        checks.OPTIMIZERS.pop(name)
    for name in (
        "bfloat16",
        "accumulate",
        "recompute",
        "compiled",
    ):
        checks.ALONE.pop(name)
    for name in ("half of the states", "states and gradients"):
        checks.OFFLOADS.pop(name)
    found = {}
    for name in ("kernels", "alone", "offload", "waits", "sanitizer"):
        with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "CUDA is not available, disabling CUDA profiling")
            held = checks.CHECKS[name](folder)
        found[name] = held, said.getvalue()
    return found


@pytest.mark.world(1)
def test_checks_of_one_rank_run_on_a_device(on_sim: Callable[..., list[Any]], tmp_path: Path) -> None:
    (found,) = on_sim(1, looked, str(tmp_path))
    assert all(found[name][0] for name in ("alone", "offload", "waits", "sanitizer")), found
    for name in ("float32", "autocast", "inputs on the host"):
        assert f"ok   {name}: losses apart" in found["alone"][1]
    assert "ok   bfloat16, AdamW, states on disk" in found["offload"][1]
    held, said = found["kernels"]  # nothing counts them here
    assert not held and "MISS kernels against plain torch: the profiler saw none" in said
    assert "ok   peak memory against the dry run" in said


def test_a_value_that_is_none_is_far_from_all() -> None:
    """Whichever step it is of."""
    apart = tool().apart
    assert apart([1.0, math.nan], [1.0, 1.0]) == math.inf == apart([1.0, 1.0], [math.nan, 1.0])
    assert apart([1.0, 2.0], [1.0, 1.0]) == 1


@pytest.mark.parametrize(("code", "held"), [(-signal.SIGKILL, True), (1, False), (None, False)])
def test_ranks_that_do_not_start_are_not_taken_for_killed(
    monkeypatch: pytest.MonkeyPatch, code: int | None, held: bool
) -> None:
    checks = tool()

    def launch(argv: Any, ranks: int) -> None:
        raise LaunchError("rank 1 of 2 failed", 1, code)

    monkeypatch.setattr(checks, "launch", launch)
    assert checks.killed("") is held
