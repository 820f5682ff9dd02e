"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from espalier.compat.deepspeed.utils import RepeatingLoader


class DeepSpeedDataLoader(DataLoader[Any]):
    """A loader of torch's, of this rank's rows.

    Args:
        local_rank: below 0: of all rows, in any order.
        tput_timer: is started before each batch.
        num_local_io_workers: by default none: rows are read by this process.
        data_parallel_world_size, data_parallel_rank: by default all ranks share the rows.
        deepspeed_dataloader_config: of curricula, which are not there.

    Raises:
        ValueError: a curriculum is asked for.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler[Any] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise ValueError(
                "DeepSpeedDataLoader: there is no curriculum: expected a data_sampler that chooses the rows."
            )
        if data_sampler is None:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)  # type: ignore[arg-type]  # it has a length
            )
        super().__init__(
            dataset,
            batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=dataloader_drop_last,
        )
        self.tput_timer, self.data_sampler = tput_timer, data_sampler

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self.tput_timer:
                self.tput_timer.start()
            yield batch


__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
