"""A pipeline's schedule as data: what each rank does, action by action.

The stages of a model are numbered 0 .. n-1 in the order of its layers. A schedule gives each pipe
rank one row of actions, done in order. It is generated (`generate`), or read from a table
(`table`), checked (`check`), simulated (`simulate`), drawn (`draw`) and executed from the same object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does.

    A backward pass is whole (``B``) or in two parts: gradients of a stage's inputs (``I``), which the
    stage before waits for, and gradients of its weights (``W``), which nobody waits for.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the papers' letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def computes(self) -> bool:
        """True for what computes, False for messages."""
        return len(self) == 1


class Action(NamedTuple):
    """One action on one micro-batch.

    ``SEND_F`` of stage s sends its outputs to the stage after, ``RECV_F`` of stage s receives its inputs from
    the stage before; ``SEND_B`` of stage s sends its inputs' gradients to the stage before, ``RECV_B`` of
    stage s receives its outputs' gradients from the stage after.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text such as ``1F0``: stage, kind, micro-batch (also how torch writes them)."""
        found = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text.strip())
        if not found or found[2] not in Kind.__members__:
            kinds = ", ".join(Kind)
            raise ValueError(
                f"{text.strip()!r} is no action: expected stage, kind, micro-batch, as 0F3 (kinds: {kinds})"
            )
        return cls(Kind[found[2]], int(found[1]), int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """What each rank of a pipeline does in one step.

    Attributes:
        kind: its name, ``"1f1b"`` say.
        ranks: pipe ranks.
        micro_batches: of the step.
        stage_to_rank: the rank that has each stage.
        actions: one row a rank, in the order in which it does them. Messages may be left out:
            `with_messages` adds them.
    """

    kind: str
    ranks: int
    micro_batches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages, of all ranks together."""
        return len(self.stage_to_rank)

    @cached_property
    def has_messages(self) -> bool:
        """True where sends and receives are among the actions."""
        return any(not action.kind.computes for row in self.actions for action in row)

    @cached_property
    def splits_backward(self) -> bool:
        """True where a backward pass is in two parts, `I` and `W`."""
        return any(action.kind is Kind.I for row in self.actions for action in row)

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return self.stage_to_rank[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank has, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def peer(self, action: Action) -> int:
        """The rank at the other end of a message."""
        ahead = action.kind in (Kind.SEND_F, Kind.RECV_B)
        return self.stage_to_rank[action.stage + (1 if ahead else -1)]

    def __str__(self) -> str:
        width = len(str(self.ranks - 1))
        head = f"{self.kind}: {self.stages} stages on {self.ranks} ranks, {self.micro_batches} micro-batches"
        rows = (
            f"rank {rank:>{width}}: {' '.join(map(str, row))}".rstrip()
            for rank, row in enumerate(self.actions)
        )
        return "\n".join([head, *rows])
