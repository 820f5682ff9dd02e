"""What calls cost: floating-point operations and bytes, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from espalier.trees import tensors_in


def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# torch's counter does not know the kernel of the CPU, which dry runs use (see ``tensor.rules.blocks``)
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
_RANDOM = torch.Tag.nondeterministic_seeded


class Work(NamedTuple):
    """What a call costs.

    Attributes:
        flops: floating-point operations.
        moved: bytes read and written, if nothing stays in caches.
        kept: bytes of what it made.
    """

    flops: int = 0
    moved: int = 0
    kept: int = 0

    def plus(self, other: Work) -> Work:
        """The sum."""
        return Work(self.flops + other.flops, self.moved + other.moved, self.kept + other.kept)


class Worked(TorchDispatchMode):
    """Adds up the work of torch's operations, call by call.

    Attributes:
        total: since the last :meth:`begin`.
        random: whether one of these drew random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total, self.random = Work(), False
        self._nested = False
        self._counts = FlopCounterMode(display=False, custom_mapping=ATTENTION).flop_registry

    def begin(self) -> None:
        """A call begins."""
        if not self._nested:
            self.total, self.random = Work(), False

    def taken(self) -> Work:
        """The work since."""
        return self.total

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """While open, all is one call's work."""
        self.begin()
        self._nested = True
        try:
            yield
        finally:
            self._nested = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.random = self.random or _RANDOM in func.tags
        packet = func.overloadpacket
        count = self._counts.get(packet)
        flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        made = 0 if is_view else sum(x.nbytes for x in tensors_in([out]))
        read = 0 if is_view else sum(x.nbytes for x in tensors_in([args, kwargs]))
        self.total = self.total.plus(Work(flops, made + read, made))
        return out
