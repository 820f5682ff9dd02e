"""Ranks on the simulated device; without a compiler their tests are skipped. What they count is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool, Skip
from tests.sim import build
from tests.sim.ranks import on_device


@pytest.fixture(scope="session")
def sim_library() -> Path:
    """The simulated device's library; compiled now, in half a minute, if it has not been yet."""
    missing = build.why_not()
    if missing is not None:
        pytest.skip(missing)
    return build.library()


@pytest.fixture(scope="session")
def sim_pool() -> Iterator[Pool]:
    """Processes apart from the suite's: what gets an accelerator keeps it."""
    pool = Pool(preload=("tests.ranks.test_engine",), forked=True)
    yield pool
    pool.close()


@pytest.fixture
def on_sim(sim_library: Path, sim_pool: Pool) -> Callable[..., list[Any]]:
    """``on_sim(n, fn, *args)``: what ``fn(shared, rank, n, *args)`` gives on n ranks with a device each."""

    def run(n: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        try:
            return sim_pool(n, on_device, sim_library, fn, *args)
        except Skip as skip:
            pytest.skip(str(skip))

    return run


_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Lines that are printed at the end."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_FIGURES, [])
    if lines:
        terminalreporter.section("on the simulated device")
        for line in lines:
            terminalreporter.write_line(line)
