"""``nn.TransformerEncoder`` in evaluation: what it gives where keys are padded, as plain torch gives it.

Without gradients plain torch leaves out padded positions, which are zeros then before the last norm, where
each row is padded at its end alone. That way takes plain tensors: on others torch computes these positions as
it does in training, and who averages over all positions would see other numbers than on one process.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from espalier.torch_private import MODULES, own_modules

_PLAIN = (torch.Tensor, nn.Parameter)


def install_encoders() -> None:
    """Let ``nn.TransformerEncoder`` do so (a second call does nothing)."""
    encoder = nn.TransformerEncoder
    if not getattr(encoder.forward, "_espalier", False):
        encoder.forward = _padded(encoder.forward)  # type: ignore[method-assign]


def _padded(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def forward(
        self: Any,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        own = [*self.layers[0].parameters(recurse=True)]
        is_plain = not any(type(x) not in _PLAIN or x.is_meta for x in (src, *own))
        if is_plain or not getattr(self, "use_nested_tensor", False) or src_key_padding_mask is None:
            return original(self, src, mask, src_key_padding_mask, is_causal)
        bare = copy.copy(self)  # whose last norm comes here, and which does not look for a faster way
        vars(bare).update({MODULES: {**own_modules(self), "norm": None}, "use_nested_tensor": False})
        out = original(bare, src, mask, src_key_padding_mask, is_causal)
        if _leaves_out(self, src, mask, own):
            here = src_key_padding_mask.logical_not()
            at_end = (here[:, 1:] <= here[:, :-1]).all()
            out = out.masked_fill((at_end & ~here).unsqueeze(-1), 0.0)
        given: torch.Tensor = out if self.norm is None else self.norm(out)
        return given

    forward._espalier = True  # type: ignore[attr-defined]
    return forward


def _leaves_out(encoder: Any, src: torch.Tensor, mask: torch.Tensor | None, own: list[torch.Tensor]) -> bool:
    """Whether plain torch leaves padded positions out, if each row has them at its end."""
    if encoder.layers[0].training or src.dim() != 3 or mask is not None:
        return False
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *own)))
