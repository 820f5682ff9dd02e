"""A model's call on a batch: what it gets, under what it runs, and where its loss is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from espalier.blocks import called, parameters_in
from espalier.engine.batches import Batches, loss_of
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.parallel.pipeline.arguments import leaves, mapped
from espalier.parallel.pipeline.record import TorchState
from espalier.parallel.tensor.infer import Sample
from espalier.tensor import DTensor, full_tensor, stamp
from espalier.tensor.draws import States
from espalier.tensor.dry_autocast import DryAutocast
from espalier.tensor.dtensor import is_sparse, refuse_nested
from espalier.tensor.told import as_addends
from espalier.texts import expect
from espalier.trees import object_map, tensors_in, tree_map

LossFunction = Callable[[Any, Any], torch.Tensor]


class ModelCall:
    """How a model is called on a batch: what it gets, under what it runs, and where its loss is.

    Attributes:
        mesh: what a batch's tensors lie on: in a pipeline that of this rank's stages.
        batches: cuts them.
        casts: autocast as it would be, on a dry mesh; else None.
        asked: what torch was told when the program called the model, where that was before a pass; else None.
        loss_draws: whether the loss draws random numbers; None: not known.
        loss_begins: the states of generators from which it does; None: those that the model ends with.
        seen_to_draw: whether a loss was seen to draw, by whether the model trains.
    """

    asked: TorchState | None = None
    loss_draws: bool | None = None
    loss_begins: States | None = None

    def __init__(self, module: nn.Module, plan: Plan, mesh: Mesh, loss_fn: LossFunction | None) -> None:
        self.module, self.plan, self.mesh, self.loss_fn = module, plan, mesh, loss_fn
        self.batches = Batches(mesh, plan)
        self.seen_to_draw: dict[bool, bool] = {}
        self.casts = DryAutocast() if mesh.is_dry and plan.precision.autocast else None

    def parted(self, batch: Any) -> tuple[Any, Any]:
        """What the model is called on, and what the loss function gets beside its output."""
        if self.loss_fn is not None and isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        return batch, batch

    def parts(self, given: Any) -> Iterable[Any]:
        """Micro-batches; a batch that stands in their place is cut."""
        parts: Iterable[Any] = self.batches.cut(given) if self.is_batch(given) else given
        expect("What is passed", parts, Iterable, "a batch, or several as a list")
        return parts

    def is_batch(self, given: Any) -> bool:
        """Whether what stands where several batches are expected is one: of tensors, as the model is called.

        A list of two tensors, as loaders make pairs, is one where these are of two kinds: no two batches are.
        """
        if isinstance(given, Mapping | torch.Tensor):
            return True
        if isinstance(given, tuple):
            return any(isinstance(x, torch.Tensor) for x in given)
        if self.loss_fn is None or not isinstance(given, list) or len(given) != 2:
            return False
        kinds = [(x.dtype, x.ndim) for x in given if isinstance(x, torch.Tensor)]
        return len(kinds) == 2 and kinds[0] != kinds[1]

    def alone(self, inputs: Any) -> Any:
        """A batch that has but these inputs."""
        return inputs if self.loss_fn is None else (inputs, None)

    def sample(self, batch: Any) -> Sample | None:
        """The model's inputs, whole, and of one row; of all, where one is sparse: a graph of rows."""
        if batch is None:
            return None
        inputs = self.parted(batch)[0]
        rows = None if any(map(is_sparse, tensors_in([inputs]))) else 1

        def whole(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            refuse_nested(x)
            return full_tensor(x).to(next(parameters_in(self.module)).device)

        def first(x: Any) -> Any:
            return x[:rows] if isinstance(x, torch.Tensor) and x.ndim and rows else x

        every = tree_map(whole, inputs)
        return Sample(tree_map(first, every), every)

    def cast(self, x: Any) -> Any:
        """An input as the model computes: floats in the dtype of its parameters, where these are cast."""
        low = self.plan.precision.parameters
        floats = low is not None and isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(getattr(torch, str(low))) if floats else x

    def autocast(self) -> AbstractContextManager[Any]:
        """What the forward pass runs under."""
        if (name := self.plan.precision.autocast) is None:
            return nullcontext() if self.asked is None else self.asked.cast_again(self.mesh.device_type)
        dtype = getattr(torch, name)
        return self.casts.autocast(dtype) if self.casts else torch.autocast(self.mesh.device_type, dtype)

    def entered(self, inputs: Any) -> Any:
        """Inputs as DTensors: their rows cut, if there is one for each rank that shares the batch."""
        rows = [x.shape[0] for x in leaves(inputs, torch.Tensor) if x.ndim]
        if min(rows, default=0) >= self.batches.readers:
            return tree_map(self.cast, self.batches.typed(inputs))

        def whole(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or isinstance(x, DTensor) or not x.ndim:
                return x
            return stamp(x.to(self.mesh.device()).view_as(x), Layout.replicated(self.mesh, tuple(x.shape)))

        return tree_map(lambda x: self.cast(whole(x)), inputs)

    def output(self, inputs: Any) -> Any:
        """What the model gives."""
        with self.autocast(), as_addends(self.mesh):
            try:
                return called(self.module, inputs)
            except TypeError as error:
                self._explain(error, inputs)
                raise
            except RuntimeError as error:
                self._explain_dtypes(error)
                raise

    def in_stage(self, program: Any, received: Any, inputs: Any, runner: Any) -> Any:
        """What a stage of it gives."""
        try:
            with self.autocast():
                return program(received, inputs, runner)
        except RuntimeError as error:
            self._explain_dtypes(error)
            raise

    def _explain_dtypes(self, error: RuntimeError) -> None:
        """Say where other dtypes may come from, if torch does not take those that have met."""
        low, buffers = self.plan.precision.parameters, self.plan.precision.buffers
        if (
            low is None
            or buffers is not None
            or not re.search("dtype|scalar type|type .* and .* type", str(error))
        ):
            return
        wide = [
            n for n, b in self.module.named_buffers() if b.is_floating_point() and str(b.dtype)[6:] != low
        ]
        if wide:
            more = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
            error.add_note(
                f'precision = "{low}" has cast parameters, but no buffers ({", ".join(wide[:3])}{more}); '
                "what is computed with these is wider. Cast it where the model uses it, or say precision = "
                f'{{"compute": "{low}", "buffers": "{low}"}} or "autocast-{low}".'
            )

    def _explain(self, error: TypeError, inputs: Any) -> None:
        """Say how the model was called, if it does not take what it was given."""
        named = isinstance(inputs, Mapping)
        given: Any = () if named else inputs if isinstance(inputs, tuple | list) else (inputs,)
        try:
            inspect.signature(self.module.forward).bind(*given, **(inputs if named else {}))
        except TypeError:
            more = (
                "with loss_fn a batch is a pair (inputs, targets): model(inputs), loss_fn(output, targets)."
            )
            if self.loss_fn is None:
                more = "a pair (inputs, targets) wants loss_fn= beside it, which gets the targets."
            error.add_note(f"The engine called model({'**' if named else '*'}batch): {more}")

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of what the model gives for a batch.

        Raises:
            ValueError: there is none, or it is not one number.
        """
        with self.autocast(), as_addends(self.mesh):
            loss = (
                self.loss_fn(output, self.parted(batch)[1]) if self.loss_fn is not None else loss_of(output)
            )
        if loss.numel() != 1:
            raise ValueError(
                f"The loss has the shape {list(loss.shape)}, expected one number. Reduce it in the model, or "
                "pass loss_fn= beside it. To make the loss in the loop, take the output by "
                "engine.outputs(inputs)."
            )
        return loss


def check_loss(loss: Any) -> None:
    """See that something can go back.

    Raises:
        TypeError, ValueError: it cannot, as no loss could.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"engine.backward(loss) was given {type(loss).__name__}, expected the tensor that engine(batch) "
            "gave, or one made of the model's output. loss.item() is a number, to be printed."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"engine.backward(loss): the loss has the shape {list(loss.shape)}, expected one number. Reduce "
            "it (loss.mean()), or pass initialize(..., loss_fn=...) and call loss = engine(batch)."
        )
    if not loss.requires_grad:
        raise ValueError(
            "engine.backward(loss): no gradient leads from this loss to the model. It was made under "
            "torch.no_grad(), of what was detached (loss.detach(), out.data), or all parameters are frozen "
            "(requires_grad_(False))."
        )


def refuse_stand_ins(module: nn.Module) -> None:
    """See that a model has its parameters.

    Raises:
        ValueError: other tensors stand in their places, for one call.
    """
    if any(not isinstance(p, nn.Parameter) for p in parameters_in(module)):
        raise ValueError(
            f"{type(module).__name__} is laid out at its first call, and in this one other tensors stand in "
            "the places of its parameters (torch.func.functional_call). Call it once before, as it is "
            "(torch.no_grad() will do), or say initialize(..., example=batch)."
        )


def plain_output(output: Any) -> Any:
    """A model's output with whole tensors, of this rank alone."""

    def whole(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return full_tensor(x).detach()
        # of classes of their own; a model's own parameters stay what they are
        return object_map(lambda y: full_tensor(y).detach(), x, DTensor, _OBJECTS, (nn.Module,))

    return mapped(whole, output)


_OBJECTS = 3  # one within another
