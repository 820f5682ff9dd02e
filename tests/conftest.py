"""Fixtures of the whole suite: ``ranks`` runs a function on a pool of gloo processes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

import pytest

from espalier.later import uncollected
from tests.pool import Pool, Skip, forks

os.environ.setdefault("OMP_NUM_THREADS", "1")
# trio, which selenium brings, gives hypothesis a plugin that warns as soon as torch's own tests load it
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")
# else each process that compiles tries first, by programs of its own, what its compiler knows
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# else each of the many processes that tests start would compile the library again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent


def _end() -> NoReturn:
    """A process of many ends without taking apart what it has imported, which takes seconds."""
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(_end)  # what is registered first comes last


def pytest_configure(config: pytest.Config) -> None:
    """Declare the suite's markers."""
    config.addinivalue_line("markers", "long: this test takes long, and so begins early")
    config.addinivalue_line("markers", "world(n): this test asks for n ranks; tests of equal n run together")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: no collection of garbage looks through it, now or later."""
    with uncollected():
        collected = yield
    gc.freeze()
    gc.set_threshold(10_000)  # as in the pool
    return collected


def pytest_unconfigure() -> None:
    """Python's end is to find all; libraries would say that they leaked what it does not.

    Of many processes none comes to it: they need not look through all there is, nor does pytest at its end.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()
    else:
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests/gpu without CUDA, and bring tests of the same number of ranks together.

    What takes long comes first: at the end all processes are to have work.
    What their modules name in ``PRELOAD`` is imported once for most ranks of the session.
    """
    gpu = [item for item in items if item.path.is_relative_to(TESTS / "gpu")]
    if gpu and not _has_cuda():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, _world_size(item)))
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    forks(sorted({name for module in modules for name in getattr(module, "PRELOAD", ())}))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _world_size(item: pytest.Item) -> int:
    """The n of the marker ``world(n)``, else of a parameter named ``world``, else 0."""
    marker = item.get_closest_marker("world")
    if marker is not None:
        return int(marker.args[0])
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get("world", 0) if callspec is not None else 0
    return size if isinstance(size, int) else 0


@pytest.fixture(scope="session")
def of_all_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of all processes of pytest that share a run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Pool]:
    """The session's pool. Its processes start when a test first asks for them."""
    pool = Pool()
    # Should pytest itself break off, multiprocessing would wait for the workers for ever at exit.
    atexit.register(pool.close)
    yield pool
    pool.close()
    atexit.unregister(pool.close)


@pytest.fixture
def ranks(rank_pool: Pool) -> Callable[..., list[Any]]:
    """``ranks(n, fn, *args, timeout=120.0)``: the results of ``fn(rank, n, *args)`` on n gloo ranks."""

    def run(n: int, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        try:
            return rank_pool(n, fn, *args, timeout=timeout)
        except Skip as skip:
            pytest.skip(str(skip))

    return run


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forks of the process that ranks of the pool come from; ``espalier.spawn`` starts its own so, too."""
    from torch import multiprocessing

    start = partial(multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(multiprocessing, "spawn", start)
    return forks()
