"""The options of DeepSpeed's command line: what they start, and what they start in truth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.compat.deepspeed.launcher import read

AS_RANK = ["-m", "espalier.compat.deepspeed.launcher"]


def test_options_become_ranks_and_machines() -> None:
    alone = read(["--num_gpus", "3", "--master_port=29711", "train.py", "--lr", "1", "--num_gpus", "7"])
    assert alone.argv == [*AS_RANK, "train.py", "--lr", "1", "--num_gpus", "7"]
    assert (alone.ranks, alone.port, alone.hosts, alone.idle) == (3, 29711, None, [])
    told = (
        "--num_nodes 2 --node_rank 1 --master_addr first --num_gpus 4 --no_local_rank -q --module pkg.train"
    )
    several = read(told.split())
    assert several.argv == ["-m", "pkg.train"] and several.ranks == 4
    assert several.hosts is not None and str(several.hosts).startswith(
        "node 1 of 2, the first is first:29500"
    )
    assert len(several.idle) == 1 and several.idle[0].startswith("--quiet")


def test_what_is_done_otherwise_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"3 mistakes(.|\n)*--include(.|\n)*--hostfile(.|\n)*--autotuning"):
        read("--autotuning run -i localhost:0,1 -H hosts train.py".split())
    with pytest.raises(ValueError, match="--node-rank"):
        read("--num_nodes 2 --master_addr first train.py".split())


def test_a_program_is_started_as_by_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, os, pathlib, sys\n"
        "assert 'espalier.engine' not in sys.modules, 'what the program does not ask for takes a second'\n"
        "from beside import FOLDER\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int, required=True)\n"
        "parser.add_argument('--lr', type=float)\n"
        "args = parser.parse_args()\n"
        "assert args.local_rank == int(os.environ['RANK'])\n"
        "assert os.environ['WORLD_SIZE'] == os.environ['WANTED']\n"
        "pathlib.Path(FOLDER, f'{args.local_rank}-{args.lr}').touch()\n"
        "raise SystemExit(5 * (args.lr > 1))\n"
    )
    (tmp_path / "beside.py").write_text(f"FOLDER = {str(tmp_path)!r}\n")

    def code(ranks: str, rate: str) -> int:
        options = ["--num_gpus", ranks, str(script), "--lr", rate]
        command = [sys.executable, "-m", "espalier.compat.deepspeed", *options]
        env = {**os.environ, "WANTED": ranks}
        return subprocess.run(command, timeout=120, capture_output=True, env=env).returncode

    assert code("2", "0.5") == 0
    assert {"0-0.5", "1-0.5"} <= {path.name for path in tmp_path.iterdir()}
    assert code("1", "2") == 5
