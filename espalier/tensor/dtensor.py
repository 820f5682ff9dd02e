"""DTensor: a tensor whose data is the local tensor and which bears a layout.

It sits above autograd: ``__torch_function__`` sees each public torch call before autograd does,
so that the recorded graph is one of local operations, and the backward pass meets Python only
where there is communication (design, section 3).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.overrides import handle_torch_function

from espalier.comm import move
from espalier.comm.custom_ops import recorders
from espalier.comm.redistribute import move_as
from espalier.layout import Layout, Placement, gradient_layout
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.torch_private import (
    getter,
    plain_call,
    raw,
    setter,
    swap_impls,
    torch_functions_on,
    without_torch_functions,
)

_shape, _device = getter("shape"), getter("device")
# dims from the one whose elements lie next to each other
_FORMATS = {(torch.channels_last, 4): (1, 3, 2, 0), (torch.channels_last_3d, 5): (1, 4, 3, 2, 0)}
_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


class _Absent:
    """A name that a class does not have, though its base does."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("a DTensor is handed out by __dlpack__ alone")


def _getter(name: str) -> property:
    """An attribute that is the same for the local and the global tensor."""
    get = getattr(torch.Tensor, name).__get__

    def read(self: DTensor) -> Any:
        return plain_call(get, (), (self,), {})

    return property(read)


def _device_of(x: DTensor) -> torch.device:
    """Where this rank's part is.

    Of what is on other ranks alone, or off the device for the time being, where this one's tensors are.
    """
    here: torch.device = plain_call(_device, (), (x,), {})
    layout = x._layout
    is_away = layout.own is not layout and getattr(x.__dict__.get("_source"), "is_elsewhere", False)
    if (is_away or (here.type == "meta" and not layout.mesh.is_member)) and torch_functions_on():
        return layout.mesh.outermost.device()
    return here


DETACHED = "espalier: copies are leaves, without gradients"  # in the memo of ``copy.deepcopy``


def absent(layout: Layout) -> ValueError:
    """What is said where values are asked for that lie on other ranks alone."""
    mesh = layout.mesh
    return ValueError(
        f"The values of {layout!r} are on ranks {list(mesh.ranks)}; this is rank {mesh.world_rank}. On all "
        "of them, redistribute it to a mesh with this rank, or ask on a rank of the mesh (mesh.is_member). "
        "Of the parameters of a pipeline, engine.full_state_dict() gives all values on all ranks, and "
        "engine.full_gradients() their gradients. Numbers made of parameters and gradients by torch's calls "
        "are known everywhere where all ranks ask for them, between the passes and the steps of the engine."
    )


class DTensor(torch.Tensor):
    """A global tensor of which this rank holds its part.

    ``shape``, ``size``, ``numel``, ``stride`` and friends answer for the global tensor. Built by
    :func:`distribute_tensor`, :meth:`from_local`, the factories (:func:`zeros`, ...) or by
    operations on other DTensors; never by its constructor.
    """

    _layout: Layout
    _above: ClassVar[Any]  # its methods that build on it: put here by the package

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor(...) cannot be called. Use distribute_tensor(tensor, mesh, placements), "
            "DTensor.from_local(local, mesh, placements) or a factory such as espalier.zeros."
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("espalier.tensor.dispatch puts the dispatcher here")

    # ---- what is answered for the global tensor; where torch functions are not intercepted (in the
    # ---- dispatcher and the runners of rules), the local tensor answers

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        if torch_functions_on():
            return self._layout.shape  # type: ignore[return-value]
        return plain_call(_shape, (), (self,), {})

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return len(self._layout.shape)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._layout.shape)

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        """The global size, of one dim or of all."""
        shape = self.shape
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self.shape.numel()

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global tensor's elements."""
        return self.numel() * self.element_size()

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the global tensor, whose dims have the order in memory that the parts' have."""
        if not torch_functions_on():
            return plain_call(torch.Tensor.stride, (), (self,) if dim is None else (self, dim), {})
        stride = self._layout.whole_stride(plain_call(torch.Tensor.stride, (), (self,), {}))
        return stride if dim is None else stride[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the global tensor's elements, as :meth:`stride` tells, lie one after another."""
        order = _FORMATS.get((memory_format, self.ndim), range(self.ndim - 1, -1, -1))
        known = memory_format is torch.contiguous_format or (memory_format, self.ndim) in _FORMATS
        if not known or not torch_functions_on():
            named = {"memory_format": memory_format}
            return bool(plain_call(torch.Tensor.is_contiguous, (), (self,), named))
        shape, stride, step = self._layout.shape, self.stride(), 1
        for d in order:
            if shape[d] != 1 and stride[d] != step:
                return not math.prod(shape)
            step *= shape[d]
        return True

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def get_device(self) -> int:
        index = self.device.index
        return -1 if index is None else index

    # ---- what is the same for both (the getters are spared the dispatcher)

    dtype = _getter("dtype")
    device = property(_device_of)
    is_leaf = _getter("is_leaf")
    grad_fn = _getter("grad_fn")
    layout = _getter("layout")
    is_sparse = _getter("is_sparse")
    is_cuda = _getter("is_cuda")
    is_meta = _getter("is_meta")
    is_quantized = _getter("is_quantized")

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records what happens to it."""
        value: bool = plain_call(_requires_grad, (), (self,), {})
        return value

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        plain_call(_set_requires_grad, (), (self, value), {})

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, a DTensor; Partial along axes on which a reduction is still to come.

        One that was reduced to shards of a replicated parameter (ZeRO-1 and 2) lies otherwise than it. Of a
        parameter in another stage it has no values here, as that.

        Raises:
            RuntimeError: it is not finished, and cannot be known yet.
        """
        unfinished = self.__dict__.get("_unfinished")
        if unfinished:
            raise RuntimeError(unfinished[0])
        grad = plain_call(_grad, (), (self,), {})
        attributes = self.__dict__
        if grad is None:
            grad = attributes.get("_reduced")
        elif type(grad) is not DTensor:
            stamp(grad, gradient_layout(self._layout).summed)
        if (seen := attributes.get("_seen")) is not None:
            return seen.shown(self, grad)
        if grad is None and not self._layout.mesh.is_member:
            DTensor._above.tell_of_absent_gradient(self._layout.mesh)
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if (seen := self.__dict__.get("_seen")) is not None:
            value = seen.given(self, value)
            if not self._layout.mesh.is_member:
                return
        reduced = self.__dict__.pop("_reduced", None)
        if value is not None and reduced is not None:
            with raw():
                lies_as = layout_of(value, self._layout.mesh)
                self._reduced = stamp(move(value.detach(), lies_as, reduced._layout), reduced._layout)
            return
        if value is not None:
            before, unsaid = plain_call(_grad, (), (self,), {}), gradient_layout(self._layout).summed
            wanted = before._layout if type(before) is DTensor else unsaid
            layout = layout_of(value, self._layout.mesh)
            if layout.shape != wanted.shape:
                raise ValueError(
                    f"The gradient given has the global shape {list(layout.shape)}, its tensor "
                    f"{list(wanted.shape)}; they must be equal."
                )
            # what adds up gradients of stages knows those that are the same on several ranks
            stays = seen is not None and layout.is_firm and layout.cuts == wanted.cuts
            if layout is not wanted and layout is not self._layout and not stays:
                with raw():
                    value = stamp(move(value.detach(), layout, wanted), wanted)
            elif type(value) is not DTensor and layout is not unsaid:  # what a plain one is taken for
                with raw():
                    value = stamp(value.detach(), layout)
        plain_call(_set_grad, (), (self, value), {})

    @grad.deleter
    def grad(self) -> None:
        if (seen := self.__dict__.get("_seen")) is not None:
            seen.given(self, None)
        self.__dict__.pop("_reduced", None)
        plain_call(_set_grad, (), (self, None), {})

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """As ``torch.Tensor.backward``, which would take a long way to the dispatcher."""
        if torch_functions_on() and not recorders():
            DTensor.__torch_function__(torch.Tensor.backward, (DTensor,), (self, *args), kwargs)
        else:
            torch.Tensor.backward(self, *args, **kwargs)

    # ---- torch.distributed.tensor's own names

    @property
    def device_mesh(self) -> Mesh:
        """The mesh it lies on."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh."""
        return self._layout.placements

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: MeshLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        order: Sequence[int | str] | None = None,
    ) -> DTensor:
        """The DTensor of which each rank gives its part; gradients flow to ``local_tensor``.

        Args:
            local_tensor: this rank's part; on axes where it is replicated, equal on all ranks.
            device_mesh: an :class:`espalier.Mesh` or torch ``DeviceMesh``; by default the one whose ``with``
                block is open.
            placements: one for each axis; replicated by default.
            run_check: compare shapes and dtype across ranks, and take the values of coordinate 0 on axes
                where it is replicated (collectives on each axis).
            shape: the global shape; by default every rank is taken to hold parts of equal size.
            stride: taken for torch's sake; a DTensor's strides follow from its parts'.
            grad_placements: how the gradients of the parts lie. By default they follow from the value's
                type: a shard's is a shard; the others are whole on every rank. ``Partial()`` where it is
                replicated: the gradients that the ranks get add up to the whole one.
            order: where several axes cut one dim, the axes in the order in which they cut, outermost first.

        Raises:
            ValueError: this rank's part does not have the shape that the layout gives it, the check
                found ranks that differ, or ``grad_placements`` cannot be.
        """
        return DTensor._above.from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            grad_placements=grad_placements,
            order=order,
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, a plain tensor; gradients flow back.

        Args:
            grad_placements: what the gradients of the local parts will be. Of a replicated value:
                ``Replicate()`` if every rank computes the same from it, ``Partial()`` if they compute
                different things, so that their gradients must be added. Without it they are taken to compute
                the same, and compare their gradients when these flow, by a short message at the end of the
                backward pass.

        Raises:
            ValueError: ``grad_placements`` cannot be; or, from the backward pass and on every rank, it was
                not given, and the gradients differ by more than rounding.
        """
        return DTensor._above.to_local(self, grad_placements)

    def redistribute(
        self,
        device_mesh: MeshLike | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        order: Sequence[int | str] | None = None,
    ) -> DTensor:
        """The same global value in another layout, by the cheapest route; differentiable.

        To another mesh, of any shape and any ranks of the world, every rank of both must call it. On
        ranks outside a mesh, a tensor that lies on it has a shape and no values.

        Args:
            async_op: taken for torch's sake; the result is always ready.
            device_mesh: by default this tensor's own.
            placements: one for each axis.
            forward_dtype: that of the communication and of the result; by default the tensor's own.
            backward_dtype: that of the gradient's communication; by default the tensor's own.
            order: where several axes cut one dim, the axes in the order in which they cut, outermost first;
                by default the mesh's own.
        """
        mesh = self._layout.mesh if device_mesh is None else as_mesh(device_mesh)
        if placements is None:
            raise ValueError("redistribute needs placements, one for each axis of the mesh.")
        layout = Layout(mesh, placements, self._layout.shape, order=order)
        dtype = self.dtype
        forward_dtype, backward_dtype = forward_dtype or dtype, backward_dtype or dtype
        if forward_dtype == backward_dtype == dtype:
            return redistribute(self, layout)
        x = up_to_date(self)
        with raw():
            return stamp(move_as(plain(x), x._layout.own, layout, forward_dtype, backward_dtype), layout)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The global tensor, plain, on every rank (a collective: call it on all ranks).

        Args:
            grad_placements: what its gradients will be: ``Replicate()`` where every rank computes the same
                from it, ``Partial()`` on axes where they compute different things. Without it they are
                taken to compute the same, and compared when they flow (see :meth:`to_local`).

        Raises:
            ValueError: this rank is outside the mesh, so it has no values (but of a stage's small ones, which
                all ranks may ask for); or see :meth:`to_local`.
        """
        lay, asked = self._layout.own, self._asked
        if not lay.mesh.is_member:
            if asked is None or grad_placements is not None:
                raise absent(lay)
            value: torch.Tensor = asked.ask(self)
            if self.requires_grad and torch.is_grad_enabled():
                value.requires_grad_().register_hook(partial(_refuse_gradient, lay))
            return value
        x = up_to_date(self)
        lay = x._layout.own
        if grad_placements is not None:
            whole = redistribute(x, Layout.replicated(lay.mesh, lay.shape))
            return whole.to_local(grad_placements=grad_placements)
        full = Layout.replicated(lay.mesh, lay.shape)
        with raw():
            out = left(move(x, lay, full))
        if asked is not None:
            asked.tell(self, out)
        busy = [axis for axis, n in enumerate(lay.mesh.shape) if n > 1]
        if not (busy and out.requires_grad):
            return out
        return DTensor._above.compared(out, full, busy, "full_tensor")

    @property
    def _asked(self) -> Any:
        """What tells values of this to ranks of other stages; None if it lies in no stage."""
        mesh = self._layout.mesh
        return None if mesh.within is None else mesh.outermost.asked

    def to_torch(self) -> Any:
        """torch's own DTensor over the same memory; gradients flow back.

        Raises:
            ValueError: the mesh is dry or a single process, or two axes cut an uneven dim in another order
                than the mesh's.
        """
        return DTensor._above.to_torch(self)

    @staticmethod
    def from_torch(tensor: Any) -> DTensor:
        """The DTensor over the same memory as torch's own ``tensor``; gradients flow back.

        Raises:
            ValueError: a placement that is private to torch, or one that cuts elsewhere than ours.
        """
        return DTensor._above.from_torch(tensor)

    def as_subclass(self, cls: type[Any]) -> Any:
        """As ``torch.Tensor.as_subclass``: the whole value, if of another class than this."""
        if issubclass(cls, DTensor):
            return self.view_as(self)
        if cls is nn.Parameter:
            return super().as_subclass(cls)
        return self.full_tensor().as_subclass(cls)

    @property
    def _spec(self) -> Any:
        """torch's DTensorSpec: mesh, placements, shape, strides and dtype, as programs ask for them."""
        return DTensor._above.spec_of(self)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """This rank's part, plain and outside autograd (torch's name for it, which programs use)."""
        DTensor._above.await_values((self,))
        with raw():
            return plain(self.detach())

    @_local_tensor.setter
    def _local_tensor(self, part: torch.Tensor) -> None:
        self.data = part

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> DTensor:
        """As ``x.data = source``, of a tensor of its shape and dtype, and nothing else.

        Raises:
            NotImplementedError: other memory would have no layout.
        """
        # torch does not ask ``__torch_function__`` here
        if not torch_functions_on():
            torch.Tensor.set_(self, source, *args, **kwargs)
            return self
        is_tensor = isinstance(source, torch.Tensor) and not args and not kwargs
        if not is_tensor or source.shape != self.shape or source.dtype != self.dtype:
            raise NotImplementedError(
                f"set_ of a DTensor ({self._layout.own!r}) would put other memory behind its layout. Assign "
                "x.data = y of its shape and dtype, or make a new one: DTensor.from_local."
            )
        self.data = source.detach()
        return self

    # ---- values, copies

    def item(self) -> Any:
        """The value of a one-element tensor (a collective unless it is replicated)."""
        return self._told(full_value(self).item())

    def _told(self, answer: Any) -> Any:
        if (told := self.__dict__.get("_when_asked")) is not None:
            told(answer)
        return answer

    def tolist(self) -> Any:
        """The global tensor as nested lists (a collective unless it is replicated)."""
        return full_value(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global tensor as a NumPy array (a collective unless it is replicated)."""
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """As :meth:`numpy`, for ``numpy.asarray``; without a copy only where nothing is gathered."""
        array = self.full_tensor().detach().numpy()
        cast = dtype is not None and dtype != array.dtype
        if copy is False and (cast or not self._layout.is_plain):
            raise ValueError(f"An array of a DTensor ({self._layout.own!r}) cannot be made without a copy.")
        if cast:
            return array.astype(dtype)
        return array.copy() if copy else array

    __dlpack_c_exchange_api__ = _Absent()  # it would go by the local tensor, and ask nobody

    def __bool__(self) -> bool:
        return self._told(bool(full_value(self)))

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return full_value(self).__index__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # never a collective: debuggers and tracebacks call it on one rank alone
        DTensor._above.await_values((self,))
        with raw():
            local = plain(self.detach())
        lay = self._layout
        name = "" if lay.is_plain else "local="
        return f"DTensor({name}{local!r}, placements={lay.placements!r}, {lay!r})"

    def __format__(self, spec: str) -> str:
        if self._layout.shape:
            return repr(self)
        whole = full_value(self)
        if whole.is_meta:
            return format(math.nan if whole.is_floating_point() else 0, spec)
        with without_torch_functions():  # modes see no question, as of a plain tensor's
            return whole.__format__(spec)

    def __deepcopy__(self, memo: dict[Any, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf and DETACHED not in memo:
            raise RuntimeError(
                "Only tensors that the user made (leaves) can be deep-copied: this one is the result of an "
                "operation that autograd records. Copy x.detach() instead."
            )
        DTensor._above.await_values((self,))
        with raw():
            copy = stamp(plain(self.detach()).clone(), self._layout.own)
            torch.Tensor.requires_grad_(copy, self.requires_grad)
            # torch's parameters are copied without gradients
            keeps = DETACHED not in memo and "_is_param" not in self.__dict__
            grad = plain_call(_grad, (), (self,), {}) if keeps else None
            if grad is not None:
                copy.grad = stamp(plain(grad).clone(), gradient_layout(self._layout))
        for name, value in self.__dict__.items():
            if name in ("_is_param", "_place"):
                copy.__dict__[name] = value
        if "_kind" in self.__dict__:  # torch's own parameters forget the rest, others may not do without
            copy.__dict__.update(deepcopy(set_by_program(self), memo))
        if (asked := self._asked) is not None:
            asked.copied(self, copy)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DTensor._above.reduced(self)

    def __copy__(self) -> torch.Tensor:
        make, given = DTensor._above.reduced(self, is_kept=False)
        copied: torch.Tensor = make(*given)
        return copied

    # ---- for torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return DTensor._above.write_items(self, fqn)

    def __create_chunk_list__(self) -> list[Any]:
        return DTensor._above.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return DTensor._above.shard(self)


def full_value(x: DTensor) -> torch.Tensor:
    """The global tensor; one call for modes of torch functions, which do not see how it is made."""
    if recorders():
        whole: torch.Tensor = handle_torch_function(full_value, (), x)
        return whole
    return x.full_tensor()


def _refuse_gradient(layout: Layout, grad: torch.Tensor) -> NoReturn:
    """Of a value of other ranks: they have its graph.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"backward() reaches a value of {layout!r}, which lies on ranks {list(layout.mesh.ranks)} and is "
        "plain here: no gradient can go back from this rank. Leave out full_tensor(): calls on the DTensor "
        "itself give all ranks one graph; or take the value alone, x.detach().full_tensor()."
    )


# what the library notes on tensors, beside what a program does
_NOTES = frozenset(
    "_alias_of _branched _deferred_version _fully_sharded _given _handed_out _how_cut _is_cut_early "
    "_is_param _layout _lent_by _made_of _mark _memory _moved _place _reduced _saved _seen _shard _source "
    "_terms _unfinished _waiting _when_asked _zeroed".split()
)


def set_by_program(x: torch.Tensor) -> dict[str, Any]:
    """What a program has set on a tensor (``p.no_decay = True``): it goes to whatever stands for it."""
    return {name: value for name, value in vars(x).items() if name not in _NOTES}


def note_kind(p: torch.Tensor) -> None:
    """Let a parameter of a class of its own (a point on a manifold, say) be one as a DTensor, too.

    ``isinstance`` says so, and optimizers ask; what else the class does it does no more. The note goes, as
    what a program has set, to whatever stands for the parameter.
    """
    kind, usual = type(p), torch.nn.Parameter
    if kind is not usual and issubclass(kind, usual) and not kind.__module__.startswith("espalier."):
        p._kind = kind  # type: ignore[attr-defined]


def kind_of(p: torch.Tensor) -> type:
    """The class that a parameter had before it was laid out, if that is one of its own."""
    kind: type = vars(p).get("_kind", type(p))
    return kind


def become_parameter(p: torch.Tensor, value: torch.Tensor, layout: Layout | None = None) -> None:
    """Let a parameter be one of another value: who holds it goes on holding it.

    Args:
        layout: of a DTensor, of which ``value`` is this rank's part; None: it is plain.

    Raises:
        RuntimeError: as :func:`become`.
    """
    become(p, torch.nn.Parameter(value, requires_grad=p.requires_grad))
    if layout is not None:
        stamp(p, layout)._is_param = True


def become(x: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor be another; who holds it goes on holding it, with what a program has set on it.

    Raises:
        RuntimeError: it cannot be: torch itself knows it.
    """
    own = set_by_program(x)
    try:
        if swap_impls is not None and weakref.getweakrefs(x):  # who has these has x, which stays
            kind, notes = type(other), dict(vars(other))
            swap_impls(x, other)
            set_class(x, kind)
            vars(x).clear()
            vars(x).update(notes)
        else:
            torch.utils.swap_tensors(x, other)
    except RuntimeError as error:
        if "weakrefs" not in str(error):
            raise
        raise RuntimeError(
            f"A tensor of shape {list(x.shape)} is to be laid out, and torch's profiler holds it: it has "
            "recorded a call of it. Let it begin behind the first batch, with "
            "torch.profiler.schedule(wait=1, warmup=1, active=3), say."
        ) from error
    vars(x).update(own)


# past ``torch.Tensor.__setattr__``, which is Python here: the way of every call and step
set_class: Callable[[Any, type], None] = vars(object)["__class__"].__set__

_grad, _set_grad = getter("grad"), setter("grad")
_requires_grad, _set_requires_grad = getter("requires_grad"), setter("requires_grad")


def stamp(x: torch.Tensor, layout: Layout) -> DTensor:
    """Make a local tensor a DTensor in place; no copy, no new autograd node."""
    set_class(x, DTensor)
    x._layout = layout  # type: ignore[attr-defined]
    return x  # type: ignore[return-value]


def plain(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor over the local data, connected by autograd."""
    return torch.Tensor.as_subclass(x, torch.Tensor) if type(x) is DTensor else x


def is_sparse(x: torch.Tensor) -> bool:
    """Whether it has one of torch's sparse layouts: no DTensor does, and it stays whole on every rank."""
    return type(x) is not DTensor and x.layout in _SPARSE


def refuse_nested(x: torch.Tensor) -> None:
    """See that a tensor is not one of torch's nested ones.

    Raises:
        ValueError: it is.
    """
    if type(x) is not DTensor and x.is_nested:
        raise ValueError(
            "A nested tensor has no layout: its rows are of several lengths, no part of it has a shape. "
            "Give rows of one length and a mask (torch.nested.to_padded_tensor(x, 0.0)), or the values of "
            "all rows one behind another, and their offsets. A function of plain tensors may use nested ones "
            "within itself: call it by espalier.local_map."
        )


def left(x: torch.Tensor) -> torch.Tensor:
    """``plain`` of what leaves the type in the user's program, which is recorded where that is."""
    with raw():
        if recorders() and type(x) is DTensor:
            return handle_torch_function(torch.Tensor.as_subclass, (x,), x, torch.Tensor)
        return plain(x)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call."""


def layout_of(x: torch.Tensor, mesh: Mesh | None = None) -> Layout:
    """The layout of a DTensor; a plain tensor is replicated on ``mesh``."""
    if type(x) is DTensor:
        return x._layout.own
    if mesh is None:
        raise TypeError("layout_of expects a DTensor; a plain tensor has no layout.")
    refuse_nested(x)
    return Layout.replicated(mesh, tuple(x.shape))


def recorded_layout(x: DTensor) -> Layout:
    """The layout by which autograd knows a leaf; another where that is elsewhere for now (see ``loans``)."""
    known: Layout | None = None
    if x._layout.own is not x._layout:
        known = getattr(x.__dict__.get("_source"), "recorded", None)
    return x._layout if known is None else known


def as_recorded(x: Any) -> Any:
    """A DTensor in the layout by which autograd knows it, with its values of now; others as they are."""
    if type(x) is not DTensor or x._layout.own is x._layout:
        return x
    return redistribute(up_to_date(x), recorded_layout(x).own)


def up_to_date(x: DTensor) -> DTensor:
    """``x``; a view of a moved copy (see ``espalier.tensor.loans``) takes its values again if need be."""
    if x._layout.own is x._layout:
        return x
    return DTensor._above.refresh(x)


def redistribute(x: DTensor, layout: Layout) -> DTensor:
    """``x`` in another layout of the same shape, differentiable."""
    x = up_to_date(x)
    if x._layout.own is layout:
        return x
    with raw():
        out = move(x, x._layout.own, layout)
        if out is x:
            out = x.view_as(x)
        return stamp(out, layout)
