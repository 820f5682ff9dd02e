"""The engine of a :class:`~espalier.compat.deepspeed.PipelineModule`: whole batches at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from espalier.compat.deepspeed.engine import DeepSpeedEngine
from espalier.compat.deepspeed.pipe import PipelineModule


class PipelineEngine(DeepSpeedEngine):
    """Trains by :meth:`train_batch`; ``forward``, ``backward`` and ``step`` are the pipeline's own.

    Attributes:
        grid, mpu: this rank's place among the ranks of the plan, and its groups.
    """

    _batches: Iterator[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mpu = self.grid = cast("PipelineModule", self.module).mpu()
        self.is_pipe_parallel = self.grid.pipe_parallel_size > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return int(self.plan.pipe)

    @property
    def stage_id(self) -> int:
        """This rank's."""
        mesh = self.engine.mesh
        return mesh.coordinate[mesh.axis("pipe")] if self.num_stages > 1 else 0

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def reset_activation_shape(self) -> None:
        """Nothing: stages tell each other the shapes of every micro-batch that is of another."""

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.stage_id == self.num_stages - 1

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Train on this."""
        self.training_dataloader: Any = loader
        self._batches = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Train on what this gives."""
        self._batches = iterator

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Forward, backward, step on as many micro-batches as make a step.

        Args:
            data_iter: gives pairs ``(inputs, labels)`` of this rank's rows; every rank needs one, those of
                the inner stages too. By default the loader of ``training_data``, over and over.

        Returns:
            the mean of the micro-batches' losses, over all ranks.
        """
        parts = self._parts(data_iter, self.micro_batches)
        self.tput_timer.start()
        self.engine.accumulate(parts)
        self._applied = self.engine.step()
        self.micro_steps += self.micro_batches
        loss = self.engine.loss
        assert loss is not None
        self._losses.append(loss)
        self._after_step()
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The loss of micro-batches, or the outputs of this rank's rows, on every rank.

        Args:
            return_logits: give both.
            compute_loss: else the outputs alone: a list, or, averaged, one.
        """
        was, parts = self.module.training, self._parts(data_iter, num_micro_batches or self.micro_batches)
        self.eval()
        try:
            loss = self.engine.evaluate(parts) if compute_loss else None
            if compute_loss and not return_logits:
                return loss
            outputs = [self.engine.outputs(part[0], "own") for part in parts]
        finally:
            self.train(was)
        if not compute_loss:
            return outputs if reduce_output is None else torch.stack(outputs).mean(0)
        return loss, outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _parts(self, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        if data_iter is None:
            if self._batches is None:
                if self.training_dataloader is None:
                    raise ValueError(
                        "This rank has no data: every rank, also of the inner stages, needs data_iter, or "
                        "training_data= for deepspeed.initialize."
                    )
                self._batches = _over_and_over(self.training_dataloader)
            data_iter = self._batches
        return [self.engine.local_batch(tuple(next(data_iter))) for _ in range(count)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused while gradients are taken: the stages pass micro-batches together."""
        if torch.is_grad_enabled():
            raise ValueError(
                "A pipeline trains by engine.train_batch(data_iter), all micro-batches together."
            )
        return super().forward(*args, **kwargs)


def _over_and_over(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
