"""ZeRO's stages as a table: how each kind of state lies along the data axis.

Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (PyTorch FSDP). Stage 3 and FSDP are one thing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, NamedTuple

Lies = Literal["R", "P", "S"]


class ZeroStage(NamedTuple):
    """How things lie along the data axis: replicated, as addends (Partial), or sharded.

    Attributes:
        parameters: between their uses.
        addends: gradients, from one micro-batch to the next.
        gradients: when the last micro-batch is done.
        states: the optimizer's, and the master copies of low-precision parameters.
    """

    parameters: Lies
    addends: Lies
    gradients: Lies
    states: Lies


STAGES: Final = MappingProxyType(
    {
        0: ZeroStage(parameters="R", addends="P", gradients="R", states="R"),
        1: ZeroStage(parameters="R", addends="P", gradients="S", states="S"),
        2: ZeroStage(parameters="R", addends="S", gradients="S", states="S"),
        3: ZeroStage(parameters="S", addends="S", gradients="S", states="S"),
    }
)
