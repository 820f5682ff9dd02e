"""Machines that run something else than the others: found as the ranks meet, where nothing else would tell.

Nobody waits here: each rank compares with the one that came first.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from espalier.mesh.process import is_fake
from espalier.torch_private import default_store

_MOST = 5  # differences that are told
_NOTHING = "nothing"


def same_on_all(what: str, mine: Mapping[str, Any], remedy: str) -> None:
    """See to it that the ranks of the running world, on other machines too, have the same.

    Args:
        what: they have, as "the same job".
        mine: this rank's, as JSON takes it.
        remedy: what to do where it is not.

    Raises:
        ValueError: it is not what the first rank to come here has; names both machines, and what differs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_fake():
        return
    store = dist.PrefixStore("espalier.alike", default_store())
    rank, host = dist.get_rank(), socket.gethostname()
    turn = store.add(f"{what}/{rank}", 1)
    said = json.dumps([rank, host, mine], default=str)
    other, place, theirs = json.loads(store.compare_set(f"{what}/of {turn}", "", said))
    ours, others = dict(_flat(json.loads(said)[2])), dict(_flat(theirs))
    apart = [key for key in {**ours, **others} if ours.get(key, _NOTHING) != others.get(key, _NOTHING)]
    if not apart:
        return
    lines = [
        f"  {key}: {ours.get(key, _NOTHING)} here, {others.get(key, _NOTHING)} there" for key in apart[:_MOST]
    ]
    more = [f"  and {len(apart) - _MOST} more"] if len(apart) > _MOST else []
    raise ValueError(
        "\n".join(
            [
                f"rank {rank} (here, on {host}) and rank {other} (there, on {place}) do not have {what}:",
                *lines,
                *more,
                remedy,
            ]
        )
    )


def _flat(table: Any, head: str = "") -> list[tuple[str, str]]:
    """The values of nested tables, as text, by dotted names."""
    if not isinstance(table, dict) or not table:
        return [(head, json.dumps(table))]
    return [pair for key, value in table.items() for pair in _flat(value, f"{head}.{key}" if head else key)]


def same_package() -> None:
    """See to it that all machines of the running world have one version of Espalier, and of torch.

    Raises:
        ValueError: they have not.
    """
    if not dist.is_initialized() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", ""):
        return  # one machine has one
    package = Path(__file__).parents[1]
    files = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        files.update(f"{path.relative_to(package)} ".encode() + path.read_bytes())
    mine = {
        "espalier": sys.modules["espalier"].__version__,
        "its files": files.hexdigest()[:12],
        "torch": torch.__version__.partition("+")[0],
    }
    same_on_all("the same packages", mine, f"Install the same on both; here Espalier lies in {package}.")
