"""The command line of DeepSpeed: ``python -m espalier.compat.deepspeed --num_gpus 2 train.py ARGUMENTS``.

Its options become what ``espalier run`` is told. Ranks find their number in the environment, and, as there,
in ``--local_rank`` before the program's own arguments.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from espalier.compat.absent import or_absent
from espalier.device import count
from espalier.mesh.hosts import PORT, Hosts, find_hosts
from espalier.mesh.launch import LaunchError, launch
from espalier.texts import refuse

_EACH = "start it on each machine, with --num_nodes N --node_rank K --master_addr HOST"
_DEVICES = "all devices of a machine are taken in their order: hide others by its own variable, --num_gpus N"
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "include": _DEVICES,
        "exclude": _DEVICES,
        "hostfile": _EACH,
        "launcher_args": "srun and mpirun start `espalier run` themselves: leave it out",
        "no_python": "ranks are Python's: name a script, or --module",
        "autotuning": "`espalier plan` finds the mix of parallelism: leave it out",
        "elastic_training": "`espalier train` goes on with the machines that are left: leave it out",
        "venv_script": "the environment of this command is the ranks': leave it out",
    }
)
_IDLE: Mapping[str, str] = MappingProxyType(
    {
        "launcher": "this machine's ranks are started here",
        "no_ssh": "no machine starts another's ranks",
        "no_ssh_check": "no machine starts another's ranks",
        "ssh_port": "no machine starts another's ranks",
        "force_multi": "one machine and several are alike",
        "save_pid": "ranks end with this process",
        "enable_each_rank_log": "what ranks print is in a folder that is told when one fails",
        "bind_cores_to_rank": "OMP_NUM_THREADS says how many threads a rank has",
        "bind_core_list": "OMP_NUM_THREADS says how many threads a rank has",
        "min_elastic_nodes": "nothing is elastic here",
        "max_elastic_nodes": "nothing is elastic here",
        "log_level": "there is no log of the start",
        "quiet": "there is no log of the start",
    }
)


class Start(NamedTuple):
    """What is started.

    Attributes:
        argv: what follows ``python`` on each rank.
        ranks: on this machine.
        port: where they meet, if it was told.
        hosts: the machines that take part; None for this one alone.
        idle: options that were given and have no effect, and why.
    """

    argv: list[str]
    ranks: int
    port: int | None
    hosts: Hosts | None
    idle: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m espalier.compat.deepspeed",
        description="Start a program's ranks by the options of DeepSpeed's command line.",
    )
    add = parser.add_argument
    add(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="Ranks: all accelerators if not given."
    )
    add("--num_nodes", type=int, default=-1, help="Machines that take part; this is called on each.")
    add("--node_rank", type=int, default=-1, help="Which of them this is.")
    add("--master_addr", default="", help="Where the first of them is.")
    add("--master_port", type=int, default=None, help="Where ranks meet.")
    add("--module", action="store_true", help="The program is a module.")
    add("--no_local_rank", action="store_true", help="The program is not given --local_rank.")
    short = {"hostfile": ["-H"], "include": ["-i"], "exclude": ["-e"], "quiet": ["-q"]}
    flags = {"no_python", "elastic_training", "no_ssh", "no_ssh_check", "force_multi", "save_pid", "quiet"}
    for name, reason in {**_REFUSED, **_IDLE}.items():
        kind: dict[str, Any] = {"action": "store_true"} if name in {*flags, "bind_cores_to_rank"} else {}
        fate = "Refused" if name in _REFUSED else "No effect"
        add(*short.get(name, []), f"--{name}", default=None, help=f"{fate}: {reason}.", **kind)
    add("user_script", metavar="SCRIPT.py", help="The program, and its arguments.")
    add("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def read(arguments: Sequence[str]) -> Start:
    """What DeepSpeed's options start.

    Raises:
        MistakeError: some ask for what is done otherwise here.
        ValueError: of several machines something is missing.
    """
    options = vars(_parser().parse_args(arguments))
    refuse(
        "DeepSpeed's options",
        [
            (f"--{name}", options[name], reason)
            for name, reason in _REFUSED.items()
            if options[name] is not None
        ],
    )
    hosts = None
    if options["num_nodes"] > 1:
        node = options["node_rank"] if options["node_rank"] >= 0 else None
        port = options["master_port"] or PORT
        place = find_hosts(
            options["num_nodes"], node, f"{options['master_addr']}:{port}" if options["master_addr"] else None
        )
        hosts = place if isinstance(place, Hosts) else None
    program = ["-m", options["user_script"]] if options["module"] else [options["user_script"]]
    if not options["no_local_rank"]:
        program = ["-m", __name__, *program]
    ranks = options["num_gpus"] if options["num_gpus"] > 0 else max(count(), 1)
    idle = [f"--{name}: {reason}" for name, reason in _IDLE.items() if options[name] is not None]
    return Start([*program, *options["user_args"]], ranks, options["master_port"], hosts, idle)


def main(arguments: Sequence[str]) -> int:
    """Start the ranks, and wait for them; gives the exit code of the one that failed first."""
    try:
        start = read(arguments)
        for line in start.idle:
            print(f"without an effect here: {line}", file=sys.stderr)
        launch(start.argv, start.ranks, port=None if start.hosts else start.port, hosts=start.hosts)
    except LaunchError as error:
        print(f"espalier: {error}", file=sys.stderr)
        code = error.exit_code or 1
        return code if code > 0 else 128 - code
    except ValueError as error:
        print(f"espalier: {error}", file=sys.stderr)
        return 2
    return 0


def run_as_rank(argv: Sequence[str]) -> None:
    """Run ``SCRIPT.py ARGUMENTS`` or ``-m MODULE ARGUMENTS`` in this rank, with ``--local_rank`` first."""
    is_module = argv[0] == "-m"
    name, *own = argv[is_module:]
    sys.argv = [name, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}", *own]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


__getattr__ = or_absent(
    __name__,
    "deepspeed.launcher",
    {
        "constants launch launcher_helper multinode_runner parse_args fetch_hostfile parse_node_config "
        "parse_node_config_list parse_resource_filter parse_inclusion_exclusion apply_num_nodes_and_gpus "
        "encode_world_info run_autotuning": (
            "espalier run, or python -m espalier.compat.deepspeed, starts ranks; several machines are told "
            "by --num_nodes, --node_rank, --master_addr"
        )
    },
    elsewhere={"runner": __name__},
)

if __name__ == "__main__":  # a rank, which runs the program as DeepSpeed's launcher calls it
    run_as_rank(sys.argv[1:])
