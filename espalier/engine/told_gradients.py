"""Which gradients stages of a pipeline have: said by each on a board, as all show them to the program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import torch

from espalier.comm.control import Board
from espalier.mesh import Mesh
from espalier.parallel.data.gradients import gradient_of
from espalier.texts import dtype_name
from espalier.torch_private import raw

Unlike = Mapping[str, str | None]  # by parameter's name, the dtype of its gradient; None: it has none


class ToldGradients:
    """What is not as expected: one gradient for each parameter that is trained, of its dtype.

    Args:
        mesh: all of it, not dry; all its ranks make it.
        here: this rank's coordinate along the axis ``pipe``.
        speaks: whether this rank says what its stages have.
        home: the coordinate that tells of a parameter, by its name.
    """

    def __init__(self, mesh: Mesh, here: int, speaks: bool, home: Callable[[str], int]) -> None:
        self._board, self._here, self._speaks, self._home = Board(mesh, "gradients"), here, speaks, home
        self._said: Unlike | None = {}

    def forget(self) -> None:
        """Others may not know what was said last."""
        self._said = None

    def say(
        self, named: Iterable[tuple[str, torch.Tensor]], taken: Mapping[torch.nn.Parameter, torch.Tensor]
    ) -> bool:
        """Whether this rank has to say, and has said, what its stages have: it counts when the board turns.

        Args:
            named: parameters by their names.
            taken: gradients that are set aside.
        """
        if not self._speaks:
            return False
        unlike: dict[str, str | None] = {}
        with raw():
            for name, p in named:
                if self._home(name) != self._here:
                    continue
                grad = gradient_of(p)
                grad = taken.get(p) if grad is None else grad  # type: ignore[call-overload]
                if grad is None:
                    unlike |= {name: None} if p.requires_grad else {}
                elif grad.dtype is not p.dtype or not p.requires_grad:
                    unlike[name] = dtype_name(grad.dtype)
        if unlike == self._said:
            return False
        self._said = unlike
        self._board.say(self._here, json.dumps(unlike).encode())
        return True

    def turn(self) -> None:
        """What was said before counts, on all ranks alike."""
        self._board.turn()

    def dtype_of(self, name: str, p: torch.Tensor) -> torch.dtype | None:
        """Of the gradient of a parameter of other ranks; None if it has no gradient."""
        unlike = _read(self._board.said(self._home(name)))
        if name not in unlike:
            return p.dtype if p.requires_grad else None
        dtype = unlike[name]
        return None if dtype is None else getattr(torch, dtype)


@lru_cache(maxsize=64)
def _read(said: bytes) -> Unlike:
    unlike: Unlike = json.loads(said or b"{}")
    return unlike
