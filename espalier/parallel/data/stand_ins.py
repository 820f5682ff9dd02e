"""What stands in for a parameter while it is cut (ZeRO-3): it is whole for whoever computes with it.

The module that owns a parameter has it gathered before it runs. Whoever else uses it meets its shard: a
head that borrows the embedding's weight, a penalty on all weights. The shard would be a value of its own
to autograd, of another shape than the whole that the owner uses. So in calls that are recorded a gathered
copy stands in, through which gradients flow to the parameter as from its owner; others get the shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from espalier.comm.custom_ops import recording
from espalier.comm.functions import OwnFunction
from espalier.comm.redistribute import carry_out
from espalier.parallel.data.chunks import ShardedParam
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor
from espalier.tensor.loans import StandIn, hand_out, is_handed_out, is_view, written_mark
from espalier.torch_private import memory_id, raw


class Owner(Protocol):
    """What has the chunk of a parameter."""

    def copy_of(self, m: ShardedParam) -> torch.Tensor | None:
        """A copy of the whole parameter, if its values are at hand."""

    def fetched(self, m: ShardedParam) -> torch.Tensor | None:
        """The same, brought to the device where it is off that; None if what comes is rounded."""

    def hidden(self, m: ShardedParam) -> torch.Tensor | None:
        """This rank's piece, where the parameter does not show it."""

    def handed_out(self) -> None:
        """Be told that an alias of the parameter's data is handed out."""

    def unused(self) -> None:
        """Cut the parameter again, if no module computes with it."""


class ShardedStandIn(StandIn):
    """What stands in for a parameter while it is cut.

    Args:
        bring: makes the parameter whole, with its chunk.
        owner: has its chunk.
        is_off: says whether what this rank holds of it lies in another memory than the model computes in.
    """

    def __init__(
        self,
        member: ShardedParam,
        bring: Callable[[], None],
        owner: Owner,
        is_off: Callable[[], bool],
    ) -> None:
        self.member, self.recorded = member, member.full
        self._bring, self._owner, self._is_off = bring, owner, is_off
        self._copy: tuple[Any, DTensor] | None = None
        self._is_hooked = False

    def stand_in(self, func: Callable[..., Any] | None) -> DTensor:
        """A gathered copy; this rank's shard where nothing is recorded."""
        refuse_recorded()
        p, m = self.member.p, self.member
        name = getattr(func, "__name__", "")
        with raw():
            if not torch.is_grad_enabled() or not p.requires_grad or name == "detach":
                piece = self._owner.hidden(m)
                alias = stamp(p.data if piece is None else piece, m.shard)  # p counts versions of the whole
                if func is None or name == "detach" or is_view(func, (p, None)):
                    hand_out(p, alias)
                return alias
            mark, is_off = written_mark(p), self._is_off()
            # what is off the device is adopted rank by rank: whether it is another is not asked there
            if self._copy is None or self._copy[0] != mark or is_handed_out(p) or is_off:
                whole = self._owner.fetched(m) if is_off else self._owner.copy_of(m)
                if whole is None and is_off:
                    raise NotImplementedError(
                        f"{m.name} is off the device, is gathered in 8 bits, and is used by another module "
                        "than the one that owns it. Let that module hold the parameter too, or leave "
                        "parameters on the device: plan.offload."
                    )
                if not self._is_hooked:
                    # a gradient may come when the owner is done, and the parameter is cut again
                    self_ref, self._is_hooked = weakref.ref(self), True
                    p.register_hook(lambda grad: _come(self_ref))
                known = self._know_whole()
                self._copy = mark, stamp(_Whole.apply(p, m, whole), m.full)
                del known
            return self._copy[1]

    def part(self) -> DTensor | None:
        """The piece: one rank may ask alone."""
        p, m = self.member.p, self.member
        if not torch.is_grad_enabled() or not p.requires_grad:
            return None
        with raw():
            piece = self._owner.hidden(m)
            alias = stamp(p.data if piece is None else piece, m.shard)
            hand_out(p, alias)
            known = self._know_whole()
            part = stamp(_Piece.apply(p, m, plain(alias), weakref.ref(self)), m.shard)
            del known
        return part

    @property
    def is_elsewhere(self) -> bool:
        """What the parameter shows then has no values."""
        return self._is_off() and self.member.p._layout is self.member.rest  # type: ignore[attr-defined]

    def _know_whole(self) -> Any:
        """Let autograd take gradients of the whole: it keeps the shape in which it first sees a leaf."""
        m, local = self.member, self.member.p.data
        m.p.data = local.new_empty(1).expand(m.full.local_shape)
        node = get_gradient_edge(m.p).node
        m.p.data = local
        return node

    def handed_out(self) -> None:
        """Tell whose parameters these are."""
        self._owner.handed_out()

    def unused(self) -> None:
        """Cut it again: it was brought for the gradient."""
        self._owner.unused()

    def forget(self) -> None:
        """Gather anew next time."""
        self._copy = None


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """All of a parameter that shows its piece; others as they are."""
    source = getattr(x, "_source", None)
    if not isinstance(source, StandIn) or x._layout is x._layout.own:  # type: ignore[attr-defined]
        return x
    return source.stand_in(None)


def _come(resting: weakref.ref[ShardedStandIn]) -> None:
    stand_in = resting()
    if stand_in is not None:
        stand_in._bring()


class _Whole(OwnFunction):
    """All of a parameter; its gradient is this rank's addend to the whole one, as in the owner's use."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, member: ShardedParam, whole: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        if whole is None:
            whole = carry_out(plain(p.detach()), member.shard, member.full)
            if memory_id(whole) == memory_id(p):  # whose versions count what is gathered and released, too
                whole = whole.clone()
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return grad, None, None


class _Piece(OwnFunction):
    """This rank's piece of a parameter; its gradient is an addend to the whole one, zero beside the piece.

    The parameter is whole when a gradient comes: no hook of its own asks for that, which one rank might have
    alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        p: torch.Tensor,
        member: ShardedParam,
        piece: torch.Tensor,
        stand_in: weakref.ref[ShardedStandIn],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.member, ctx.stand_in = member, stand_in
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        whole = grad.new_zeros(ctx.member.full.local_shape)
        ctx.member.piece(whole).copy_(grad)
        _come(ctx.stand_in)
        return whole, None, None, None


def refuse_recorded() -> None:
    """See that no program is being recorded: its graph would be without what is done now.

    Raises:
        NotImplementedError: one is.
    """
    if recording():
        raise NotImplementedError(
            "espalier.compile: by zero = 3 parameters are gathered within this region; no graph can do that. "
            "Let the engine compile the blocks, before each of which all is gathered that it uses: "
            "initialize(..., compile=True), or engine.compile()."
        )
