"""Where ranks tell each other how a call ended, so that one that failed alone stops nobody."""

from __future__ import annotations

import re
from datetime import timedelta

import torch.distributed as dist

# so long a rank that failed waits for the others before it takes them to hang, seconds
PATIENCE = 5.0
# gloo's words for a group in which nothing goes any more
_BROKEN = re.compile("Timed out waiting|Application timeout|Connection closed")


class Meeting:
    """Where the ranks tell each other how a call ended, beside the process group."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        port = [0]
        if rank == 0:
            self.store = dist.TCPStore("localhost", 0, world, is_master=True, wait_for_workers=False)
            port = [self.store.port]
        dist.broadcast_object_list(port)
        if rank:
            self.store = dist.TCPStore("localhost", port[0], world, is_master=False)
        self.count = self.worlds = 0

    def exchange(self, told: str, failed: bool) -> tuple[list[str], bool]:
        """What every rank tells, and whether the group is broken.

        A rank that ``failed`` leaves the group if it waits too long for the others.
        """
        keys = self._tell(told)
        left = False
        if failed:
            try:
                self.store.wait(keys, timedelta(seconds=PATIENCE))
            except dist.DistStoreError:
                left = True
                dist.destroy_process_group()
        found = [value.decode() for value in self.store.multi_get(keys)]
        broken = len({t[0] for t in found}) > 1 or any(_BROKEN.search(t) for t in found)
        if found[0].startswith("1") and not broken:
            broken = b"1" in self.store.multi_get(self._tell(str(int(left))))
        return found, broken

    def _tell(self, text: str) -> list[str]:
        self.count += 1
        self.store.set(f"{self.count}/{self.rank}", text)
        if self.count > 4:
            self.store.delete_key(f"{self.count - 4}/{self.rank}")
        return [f"{self.count}/{r}" for r in range(self.world)]

    def rejoin(self) -> None:
        """Meet in a new process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.worlds += 1
        store = dist.PrefixStore(f"world {self.worlds}", self.store)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world, timeout=timedelta(seconds=30)
        )
