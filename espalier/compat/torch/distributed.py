"""``torch.distributed``, whose ranks on one machine meet without being told where.

``from espalier.compat.torch import distributed as dist``. Processes that ``mp.spawn`` has started know their
rank, and ``MASTER_ADDR`` is often forgotten: as they have one parent, they are on its machine.
"""

import multiprocessing
import os
from typing import Any

from torch import distributed

from espalier.mesh.process import use_loopback


def init_process_group(
    backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any
) -> None:
    """As torch's; ranks that a program has started itself meet on this machine if it says no address.

    The port is told by the number of the process that started them.
    """
    own = multiprocessing.parent_process()
    says = init_method is not None or kwargs.get("store") is not None or len(args) > 3
    if own is not None and own.pid and not says and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ.setdefault("MASTER_PORT", str(20000 + own.pid % 20000))
        use_loopback(os.environ)
    distributed.init_process_group(backend, init_method, *args, **kwargs)


def __getattr__(name: str) -> Any:
    return getattr(distributed, name)


__all__ = ["init_process_group"]
