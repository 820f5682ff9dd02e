"""Regions whose programs are alike are compiled once: the blocks of a model mostly are.

So a model of many equal blocks is compiled in the time of one, as torch's regional compilation does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from espalier.comm.redistribute import RedistributePlan
from espalier.mesh import Mesh
from espalier.tensor.bucketing import said_of_graph
from espalier.tensor.compiled import Backend, kinds, state
from espalier.tensor.recorder import Bound, Slot
from espalier.tensor.surroundings import CONSTANTS
from espalier.trees import leaves


class Alike:
    """Compiles the programs of several regions, those that are alike once.

    Args:
        compiler: compiles a program.
        together: ranks ask each other while they compile, so that all must, or none.
    """

    def __init__(self, compiler: Backend, together: bool) -> None:
        self._compiler, self._together = compiler, together
        self._known: dict[Any, dict[int, Callable[..., Any]]] = {}  # programs of this rank, by their numbers
        self._number = 0

    def of_region(self) -> Backend:
        """The compiler of one region."""
        own: dict[Any, Callable[..., Any]] = {}

        def compile(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            program = _program(module.graph, inputs)
            if program not in own:  # one that comes again, comes on one rank alone
                own[program] = self._compiled(program, module, inputs)
            return own[program]

        return compile

    def _compiled(
        self, program: Any, module: fx.GraphModule, inputs: list[torch.Tensor]
    ) -> Callable[..., Any]:
        known = self._known.setdefault(program, {})
        meshes = _meshes(module.graph) if self._together else set()
        common = _known_to_all([*known], meshes) if meshes else [*known]
        if common:
            return known[common[0]]
        self._number += bool(meshes)  # one that sends nothing may be compiled by a rank alone
        known[self._number] = self._compiler(module, inputs)
        return known[self._number]


def _known_to_all(numbers: list[int], meshes: set[Mesh]) -> list[int]:
    """As which of the programs compiled so far all ranks know theirs.

    What is one program on a rank may be several on others, to which other parts of tensors came.
    """
    whole = max(meshes, key=lambda mesh: mesh.size())
    if not whole.is_member or any(set(mesh.ranks) - set(whole.ranks) for mesh in meshes):
        return []
    all_said = said_of_graph(whole, "is known as", numbers) or [[]]
    return [number for number in numbers if all(number in said for said in all_said)]


def _meshes(graph: fx.Graph) -> set[Mesh]:
    """The meshes on which a program may communicate: they are so on all ranks, or on none.

    What a move only cuts, or sets to zero, it may do on some ranks alone.
    """
    bound = [node.target.template for node in graph.nodes if type(node.target) is Bound]
    told = [x for x in leaves(bound, sought=()) if not isinstance(x, RedistributePlan) or x.sends]
    meshes = [x if isinstance(x, Mesh) else getattr(x, "mesh", None) for x in told]
    return {mesh for mesh in meshes if isinstance(mesh, Mesh)}


def _program(graph: fx.Graph, inputs: list[torch.Tensor]) -> Any:
    """What tells a program from others, hashable."""
    numbers = {node: i for i, node in enumerate(graph.nodes)}

    def form(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return "node", numbers[x]
        if isinstance(x, tuple | list):
            return tuple, *map(form, x)
        if isinstance(x, dict):
            return dict, *((form(key), form(value)) for key, value in x.items())
        if isinstance(x, slice):
            return slice, form(x.start), form(x.stop), form(x.step)
        if type(x) is Bound:
            return Bound, form(x.function), form(x.template)
        if type(x) is Slot:
            return Slot
        if isinstance(x, float | complex):
            return type(x), repr(x)  # 0.0 is not -0.0
        return (type(x), x) if isinstance(x, CONSTANTS) or x.__hash__ is not None else _Itself(x)

    nodes = tuple((node.op, form(node.target), form(node.args), form(node.kwargs)) for node in graph.nodes)
    return state(), tuple(kinds(inputs)), nodes


class _Itself:
    """An object that is like no other."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._held is self._held

    def __hash__(self) -> int:
        return id(self._held)
