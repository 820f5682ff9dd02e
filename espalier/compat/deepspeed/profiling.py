"""``deepspeed.profiling``: operations, products and parameters of a model.

Matrix products, convolutions and attention are counted, as torch's ``FlopCounterMode`` does; what works
element by element is not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from espalier.compat.absent import or_absent
from espalier.tensor.dry_runs import UNCOUNTED

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"))


class FlopsProfiler:
    """Counts what is computed between :meth:`start_profile` and :meth:`stop_profile`.

    Args:
        model: whose parameters are counted; on an engine those of the whole model.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.started = False
        self._counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
        self._stack = ExitStack()
        self._begun = self._seconds = 0.0

    def start_profile(self, ignore_list: Any = None) -> None:
        """Begin."""
        self.reset_profile()
        self._stack.enter_context(self._counter)
        self._begun, self.started = time.perf_counter(), True

    def stop_profile(self) -> None:
        """End; what was counted stays."""
        if self.started:
            self._stack.close()
            self._seconds, self.started = time.perf_counter() - self._begun, False

    def reset_profile(self) -> None:
        """Begin anew."""
        self.stop_profile()
        self._counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)

    def end_profile(self) -> None:
        """End, and forget."""
        self.reset_profile()

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Floating-point operations."""
        count = self._counter.get_total_flops()
        return flops_to_string(count) if as_string else count

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Products that are added up: half of the operations."""
        count = self._counter.get_total_flops() // 2
        return macs_to_string(count) if as_string else count

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters."""
        count = sum(p.numel() for p in self.model.parameters())
        return params_to_string(count) if as_string else count

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds."""
        return duration_to_string(self._seconds) if as_string else self._seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print, or write, the totals and, in detail, the operations of each module."""
        totals = (
            f"{self.get_total_params(True)} parameters",
            self.get_total_flops(True),
            self.get_total_macs(True),
            self.get_total_duration(True),
        )
        lines = [f"step {profile_step}: {', '.join(totals)}"]
        for name, counts in self._counter.get_flop_counts().items() if detailed else ():
            depth = name.count(".")
            if name != "Global" and (module_depth < 0 or depth <= module_depth):
                lines.append(f"{'  ' * depth}{name}: {flops_to_string(sum(counts.values()))}")
        text = "\n".join(lines)
        if output_file is None:
            print(text, flush=True)
        else:
            Path(output_file).write_text(f"{text}\n", "utf-8")


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Any = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, products and parameters of one call of a model, which is put into ``eval()``.

    Args:
        input_shape: of its one input, in place of ``args`` and ``kwargs``.
        mode: ``"forward"``, or ``"generate"`` for that method.

    Raises:
        ValueError: there is no input.
    """
    if input_shape is not None:
        like = next(iter(model.parameters()), torch.ones(()))
        args = [torch.zeros(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ValueError("get_model_profile: expected input_shape=, args= or kwargs=.")
    call = model if mode == "forward" else getattr(model, mode)
    model.eval()
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    call(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


# ---- in words


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number and its unit (``K``, ``M``, ``G``, ``T``)."""
    if units is None:
        size, units = next(
            (pair for pair in _UNITS if num >= pair[0]), (1.0, "") if num == 0 else (1e-6, "u")
        )
    else:
        size = {name: size for size, name in _UNITS}.get(units, 1.0)
    return f"{round(num / size, precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Products."""
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds."""
    return f"{number_to_string(duration, units, precision)}s"


__all__ = ["FlopsProfiler", "get_model_profile"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.profiling",
    {
        "config constants": "say the section flops_profiler as a dict: deepspeed.initialize(config=)",
        "get_module_flops get_module_macs get_module_duration wrapFunc": (
            "FlopsProfiler(model) counts a whole model; torch.profiler breaks it down"
        ),
    },
    elsewhere={"flops_profiler profiler": __name__},
)
