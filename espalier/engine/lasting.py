"""What of an engine outlives it: checkpoints, and weights in other formats."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from espalier.checkpoint import CheckpointError, Saver
from espalier.engine import weights
from espalier.engine.loader import Loader
from espalier.engine.scaling import LossScaler
from espalier.engine.state import candidates, index_and_tree, named_values, opened, restore
from espalier.engine.whole import gradients_of, state_of
from espalier.mesh import Mesh
from espalier.parallel import Plan, everywhere
from espalier.parallel.data.axis import DataAxis
from espalier.tensor.caller import user_frame


class Lasting:
    """The part of an engine that saves and loads."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    plan: Plan
    mesh: Mesh
    scaler: LossScaler | None
    steps: int
    _data: DataAxis | None
    _has_gradients: bool
    _saver: Saver | None = None
    _loaders: tuple[Loader, ...] = ()

    if TYPE_CHECKING:  # the engine's

        def _laid_out(self) -> DataAxis: ...

        def zero_grad(self) -> None: ...

        def batch_rows(self, size: int) -> slice: ...

        def local_batch(self, rows: Any, size: int | None = None) -> Any: ...

        def _holds_gradients(self) -> bool: ...

    @property
    def _names(self) -> list[str]:
        """The parameters'."""
        return [name for name, _ in self.module.named_parameters()]

    def _saves(self, name: str) -> bool:
        """Whether this rank has a share in saving a parameter of which it holds a part."""
        return True

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """Global batches of a dataset; each rank loads its rows, and :meth:`save` knows where they stand.

        Iterating gives an epoch's batches, as :meth:`local_batch` gives them: for a call of the engine,
        :meth:`train_step` or the like. After :meth:`load` it goes on behind the last batch that was given
        before the save, on any number of ranks. Make it before :meth:`load`; of several, in the same order.

        Args:
            dataset: has ``__len__`` and ``__getitem__``, the same on all ranks.
            batch_size: rows of the global batch.
            shuffle: draw the rows of each epoch in another order.
            seed: of these orders.
            drop_last: leave out what is left at an epoch's end; else it is a smaller batch.
            collate_fn: makes a batch of a list of rows, as for torch's ``DataLoader``. What it makes on one
                rank must fit what it makes on the others: pad to one length.
            options: further ones of torch's ``DataLoader``, as ``num_workers``.

        Raises:
            ValueError: the dataset has no length, or ``options`` say how rows are drawn.
        """
        made = Loader(
            self.local_batch,
            self.batch_rows,
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            options=options,
        )
        self._loaders = (*self._loaders, made)
        return made

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        asynchronous: bool = False,
        durable: bool = False,
        keep: int | None = None,
        **extra: Any,
    ) -> Path:
        """Save all that a run needs to go on, between two steps (a collective: every rank must call).

        Model, optimizer, scaler, random state, :attr:`steps` and the position of each :meth:`loader`, as any
        plan on any number of ranks can load them. The checkpoint is visible once it is whole.

        Args:
            directory: where the checkpoint's own folder, ``step-00000100``, is made.
            asynchronous: return at once; copy to the host's memory and write meanwhile. Updates wait until
                what they change is copied; :meth:`wait_staged` does, too. :meth:`wait_saved`, or the next
                save, raises what went wrong.
            durable: return when the checkpoint outlives a crash of the machine. Else it is there, and
                outlives this process; it comes to outlive the machine's crash meanwhile, as after
                :meth:`wait_saved`, and older ones stay until then. Asynchronous saves are there only when
                they do.
            keep: how many checkpoints to leave in ``directory``: the newest.
            extra: plain values, tensors, or objects with ``state_dict()``, the same on all ranks.

        Returns:
            the checkpoint's folder.

        Raises:
            ValueError: something in ``extra`` or the optimizer cannot be saved; there are gradients.
            CheckpointError: on all ranks, if it could not be written; those before it are as they were.
        """
        if self.mesh.is_dry:
            raise ValueError("A dry mesh holds no values: there is nothing to save.")
        if self._holds_gradients():
            raise ValueError("There are gradients, which no checkpoint holds: save after engine.step().")
        data, given = self._laid_out(), dict(named_values(self))
        if self._saver is None:
            self._saver = Saver(self.mesh)
        self.wait_staged()  # masters may follow what was written to parameters
        with torch.no_grad(), data.stored():
            index, tree = index_and_tree(self.module, self.optimizer, self.mesh, given, extra, self._saves)
            plan = json.dumps(self.plan.model_dump(), default=str)
            index.step, index.plan = self.steps, json.loads(plan)
            return self._saver.save(
                Path(directory), index, tree, keep=keep, asynchronous=asynchronous, durable=durable
            )

    def wait_staged(self) -> None:
        """Until an asynchronous save has copied parameters and states: from then on they may be written to.

        What the engine itself does waits by itself. No collective.
        """
        if self._saver is not None:
            self._saver.wait_staged()

    def wait_saved(self) -> None:
        """Until the checkpoint that is being written is there, and outlives a crash (a collective).

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def load(
        self, directory: str | os.PathLike[str], *, model_only: bool = False, **extra: Any
    ) -> dict[str, Any]:
        """Go on where a checkpoint was saved, under any plan (a collective: every rank must call).

        Data goes on, too, if it comes from a :meth:`loader`. Where a shuffled ``DataLoader`` of torch stands
        is not known, of which a warning tells.

        Args:
            directory: a checkpoint, or a folder of them: then the newest whole one, and where that turns out
                to be damaged, with a warning, the one before.
            model_only: leave optimizer, scaler, random state and :attr:`steps` as they are.
            extra: objects with ``load_state_dict()``, by the names under which they were saved.

        Returns:
            what was saved as ``extra``.

        Raises:
            ValueError: model or optimizer differ from what was saved, listing all that does: nothing is
                changed, then. The layouts are not known yet: call :meth:`lay_out` on a batch first, or pass
                ``example=`` to :func:`initialize`.
            CheckpointError: on all ranks, if there is none, or a file is damaged.
        """
        data = self._laid_out()
        self.wait_saved()
        self.zero_grad()
        paths = candidates(directory, self.mesh)
        for path, following in itertools.zip_longest(paths, paths[1:]):
            try:
                return restore(self, opened(path, self.mesh), data, extra, model_only)
            except CheckpointError as error:
                if following is None:
                    raise
                warnings.warn(f"{error} Now {following} is tried.", stacklevel=user_frame()[0])
        raise AssertionError

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state dict with plain whole tensors (a collective: every rank must call).

        Parameters that have float32 masters are these.
        """
        self.wait_staged()
        with nullcontext() if self._data is None else self._data.precise():
            return state_of(self.module, self._everywhere)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients as plain whole tensors (a collective: every rank must call), by parameter.

        They are those of the whole batch after ``finish_gradients()``. None: no rank has one.
        """
        return gradients_of(self.module, self.mesh, self._everywhere)

    def _everywhere(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The plain global value of a parameter or buffer, on every rank."""
        return everywhere(x, self.mesh).detach()

    def load_weights(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Take the model's weights from files of another format; each rank reads what it holds (collective).

        Args:
            path: a file of safetensors or of ``torch.save``, a folder of one of these, as Hugging Face has
                them, or of ``torch.distributed.checkpoint``. Values are rounded to the parameters' dtype, or
                that of their float32 masters. What was pickled is read without executing any of it.
            optimizer: take the optimizer's states and options too, which lie beside the model's weights, as
                torch's ``get_state_dict`` or ``optimizer.state_dict`` gives them.

        Raises:
            ValueError: it cannot be read, or holds the weights of another model.
        """
        self.wait_staged()
        weights.load_weights(self, self._laid_out(), path, optimizer)

    def export(
        self,
        path: str | Path,
        format: str = "safetensors",
        *,
        dtype: torch.dtype | None = None,
        shard_gigabytes: float = 5.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the model's weights as others read them: rank 0 does, piece by piece (collective).

        Args:
            path: a new folder; for ``"torch"`` a new file. ``.../NAME.safetensors`` is one file, with all
                names of a tensor that has several; it takes the place of one that is there.
            format: ``"safetensors"``, as Hugging Face's ``save_pretrained`` writes it, with the config of the
                model if it has one; ``"torch"``, a state dict by ``torch.save``; ``"dcp"``, a folder of
                ``torch.distributed.checkpoint`` with the dict ``model``.
            dtype: of floating-point tensors; by default the parameters', or float32 where they have masters.
            shard_gigabytes: (10^9 bytes) of a file of safetensors, where there are several.
            metadata: texts for the header, where it is one.

        Raises:
            ValueError: it cannot be written.
        """
        shard_bytes = int(shard_gigabytes * 1e9)
        self.wait_staged()
        weights.export(self, self._laid_out(), path, format, dtype, shard_bytes, metadata)


__all__ = ["Lasting"]
