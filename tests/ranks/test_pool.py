"""The pool itself: results, failures, hangs, deaths, and what it costs."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError


def add_ranks(rank: int, world: int, scale: float) -> float:
    value = torch.tensor([scale * (rank + 1)], dtype=torch.float64)
    dist.all_reduce(value)
    assert dist.get_world_size() == world
    return value.item()


def pid(rank: int, world: int) -> int:
    return os.getpid()


def raise_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise KeyError(f"rank {rank} has no such thing")
    dist.barrier()


def hang_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(60)
    dist.barrier()


def die_on(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def warn(rank: int, world: int) -> None:
    warnings.warn("look out", UserWarning, stacklevel=1)


def skip(rank: int, world: int) -> None:
    pytest.skip("not on this machine")


def make_groups(rank: int, world: int) -> int:
    for _ in range(2):
        dist.barrier(dist.new_group(list(range(world))))
    return len(os.listdir("/proc/self/task"))


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_reduce(ranks, world):
    total = 0.5 * world * (world + 1) / 2
    assert ranks(world, add_ranks, 0.5) == [total] * world


def test_workers_are_reused_when_the_world_changes_size(ranks):
    four = ranks(4, pid)
    assert len(set(four)) == 4
    assert ranks(2, pid) == four[:2]
    assert ranks(4, pid) == four


def test_a_call_in_the_same_world_is_cheap(ranks):
    ranks(2, pid)
    start = time.perf_counter()
    for _ in range(20):
        ranks(2, pid)
    assert (time.perf_counter() - start) / 20 < 0.05


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_names_its_rank_and_keeps_the_workers(ranks, culprit):
    before = ranks(2, pid)
    with pytest.raises(RankError, match=f"rank {culprit} of 2 raised.*KeyError") as caught:
        ranks(2, raise_on, culprit)
    assert caught.value.rank == culprit
    assert isinstance(caught.value.original, KeyError)
    assert "in raise_on" in str(caught.value)
    assert ranks(2, add_ranks, 1.0) == [3.0, 3.0]
    assert ranks(2, pid) == before


def test_a_warning_is_an_error_on_a_rank_too(ranks):
    with pytest.raises(RankError, match="UserWarning: look out"):
        ranks(2, warn)


@pytest.mark.filterwarnings("ignore:look out")
def test_a_rank_obeys_the_warning_filters_of_its_test(ranks):
    assert ranks(2, warn) == [None, None]


def test_a_skip_on_a_rank_skips_the_test(ranks):
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        ranks(2, skip)


def test_a_result_that_cannot_be_pickled_is_an_error(ranks):
    with pytest.raises(RankError, match="(?s)unpicklable.*pickle"):
        ranks(1, unpicklable)


def test_too_many_ranks(ranks):
    with pytest.raises(ValueError, match="1 to 16 ranks, asked for 17"):
        ranks(17, pid)


def test_groups_left_behind_do_not_pile_up(ranks):
    threads = [max(ranks(2, make_groups)) for _ in range(60)]
    # A new world begins every 50 calls at the latest, so the last calls must have fewer than the peak.
    assert threads[-1] < max(threads)


def test_hang_and_death_end_soon_and_the_pool_recovers():
    pool = Pool(forked=True)
    try:
        pool(2, add_ranks, 1.0)
        before = pool.pids()
        start = time.monotonic()
        with pytest.raises(RankError, match=r"no answer from ranks \[0, 1\] within 1 s") as caught:
            pool(2, hang_on, 1, timeout=1)
        assert time.monotonic() - start < 10
        assert "hang_on" in str(caught.value)
        assert not any(_alive(pid) for pid in before)

        assert pool(2, add_ranks, 1.0) == [3.0, 3.0]
        with pytest.raises(RankError, match="rank 1 of 2 died in .*die_on: killed by SIGKILL"):
            pool(2, die_on, 1)
        assert pool(1, add_ranks, 1.0) == [1.0]
        before = pool.pids()
    finally:
        pool.close()
    assert not any(_alive(pid) for pid in before)


def test_ranks_that_do_not_meet_try_once_more(tmp_path, capfd):
    pool = Pool(forked=True)
    pool._folder = tmp_path / "pool"
    for blocked in (1, 3, 4):
        (pool._folder / f"world-{blocked}").mkdir(parents=True)  # no file: nobody can meet there
    try:
        assert pool(2, add_ranks, 1.0) == [3.0, 3.0]
        assert "Is a directory" in capfd.readouterr().err
        pool._world = None
        with pytest.raises(RankError, match=r"rank \d of 2 raised in .*add_ranks.*Is a directory"):
            pool(2, add_ranks, 1.0)
        assert pool(2, add_ranks, 1.0) == [3.0, 3.0]
    finally:
        pool.close()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
