"""Private names of torch are found wherever they stand."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "private.py"  # `make lint` runs it on the package
PROGRAM = '''
import sys, threading, torch
from torch import nn, _lazy_clone
from torch.utils import _pytree as trees
from espalier.engine import engine

class Base:
    """Of ours: it has a ``_buffers`` and a ``_version`` of its own."""
    __slots__ = ("_buffers", "_device")
    def _apply(self): ...

class Held(Base):
    def __init__(self, module, x, op, group):
        self._version = x._version
        self._apply(), self._buffers, self._device, f"{x}_apply"
        self._modules, module._parameters, super()._buffers
        x.untyped_storage()._cdata, op._schema, group._get_backend(x.device), engine._sequence_nr()
        getattr(x.grad_fn, "_forward_cls", None), "_forward_hooks" in vars(module)
        torch.ops.aten._softmax(x), sys._getframe(), threading._shutdown(), x._replace(), x._of_ours
        getattr(torch, "_neg_view", None), nn.modules._functions.rnn, trees.tree_map, getattr(nn, "_x")
'''


def test_what_is_private_to_torch_is_seen() -> None:
    """Names that are imported or reached, and attributes of objects, but for what a class of ours defines."""
    spec = importlib.util.spec_from_file_location("private_tool", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tree = ast.parse(PROGRAM)
    found = {name for _, name in tool.Reader(tree, tool.borne(), tool.Classes([tree])).found(tree)}
    assert found == {
        *("torch._lazy_clone", "torch.utils._pytree", "'_neg_view'", "torch.nn.modules._functions"),
        *("torch.nn._x", "x._version", "self._modules", "module._parameters", "super()._buffers"),
        *("x.untyped_storage()._cdata", "op._schema", "group._get_backend", "engine._sequence_nr"),
        *("'_forward_cls'", "'_forward_hooks'"),
    }
