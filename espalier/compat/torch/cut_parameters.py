"""Parameters that are cut when they are first asked how: as ``fully_shard`` leaves them until the first call.

torch cuts a module's parameters in ``fully_shard``. Here they lie as the plan of the outermost module says,
which is known at its first call; until then they are plain, whole, and each rank's own. What a program asks
of torch's (``p.placements``, ``p.to_local()``, ``isinstance(p, DTensor)``, ...) cuts a parameter before:
every rank keeps its piece of its own value, as in torch. Nothing is sent, so one rank may ask alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import new_class
from typing import Any

import torch
from torch import nn

from espalier.blocks import parameters_in
from espalier.layout import Layout
from espalier.parallel.tensor.tables import whole_of
from espalier.tensor import DTensor, lay_out, plain
from espalier.tensor.dtensor import become_parameter, set_by_program, set_class

_LayoutOf = Callable[[torch.Tensor], Layout]
_HOW, OWNER = "_how_cut", "_fully_sharded"  # how it is to be cut; the outermost module, weakly


def _cut(p: Any) -> DTensor:
    """Let a parameter be this rank's piece of it: who holds it goes on holding it."""
    layout_of, owner = vars(p).pop(_HOW), vars(p).get(OWNER)
    set_class(p, nn.Parameter)
    layout = layout_of(p)
    with torch.no_grad():
        local = plain(lay_out(p, layout, source=None))
    become_parameter(p, local, layout)
    vars(p).update({"_is_cut_early": True, OWNER: owner})
    cut: DTensor = p
    return cut


def _asks(name: str) -> property:
    return property(lambda self: getattr(_cut(self), name))


def _copied(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """A plain one."""
    if id(self) not in memo:
        whole = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = nn.Parameter(whole, self.requires_grad)
    copy: nn.Parameter = memo[id(self)]
    return copy


def _reduced(self: nn.Parameter, protocol: Any) -> Any:
    """As a plain one."""
    whole = nn.Parameter(self.detach(), self.requires_grad)
    vars(whole).update(set_by_program(self))
    return whole.__reduce_ex__(protocol)


def _shown(self: nn.Parameter) -> str:
    return f"Parameter containing:\n{torch.Tensor.__repr__(self)}"


def _names() -> dict[str, Any]:
    """What a plain parameter has where a DTensor has its own; what a DTensor alone has asks."""
    made: dict[str, Any] = {"__deepcopy__": _copied, "__repr__": _shown, "__module__": __name__}
    made |= {"__reduce_ex__": _reduced, "_layout": _asks("_layout")}
    for name, own in vars(DTensor).items():
        if name in made or name in ("__dict__", "__weakref__", "__doc__", "__annotations__"):
            continue
        try:
            made[name] = inspect.getattr_static(nn.Parameter, name)
        except AttributeError:
            if not isinstance(own, staticmethod) and name != "_above":
                made[name] = _asks(name)
    return made


#: A DTensor to ``isinstance``, that is a plain parameter until it is asked as one.
CutWhenAsked: Any = new_class("CutWhenAsked", (DTensor,), exec_body=lambda names: names.update(_names()))


def cut_when_asked(module: nn.Module, layout_of: _LayoutOf) -> None:
    """Let a module's plain parameters be cut when a program asks how they are.

    Not those of ``espalier.deferred()``, whose values are yet to be made.
    """
    for p in parameters_in(module):
        if type(p) not in (nn.Parameter, CutWhenAsked):  # parallelize_module has cut it
            continue
        if not (p.is_meta and hasattr(p.untyped_storage(), "_deferred")):
            set_class(p, CutWhenAsked)
            vars(p).update({_HOW: layout_of, "_is_param": True})


def cut_all(module: nn.Module) -> None:
    """Cut those that are not yet."""
    for p in parameters_in(module):
        if type(p) is CutWhenAsked:
            _cut(p)


def left_plain(module: nn.Module) -> None:
    """Let those that nobody asked be plain parameters again."""
    for p in parameters_in(module):
        if type(p) is CutWhenAsked:
            del vars(p)[_HOW], vars(p)["_is_param"]
            set_class(p, nn.Parameter)


def is_cut(module: nn.Module) -> bool:
    """Whether a program has asked for, or put in the place of parameters, some that are cut."""
    return any(type(p) is DTensor for p in parameters_in(module))


@torch.no_grad()
def made_whole(module: nn.Module) -> None:
    """Let parameters that are cut be plain and whole again (a collective)."""
    left_plain(module)
    for p in parameters_in(module):
        vars(p).pop(OWNER, None)
        if type(p) is DTensor:
            become_parameter(p, whole_of(p))
            vars(p).pop("_is_cut_early", None)
