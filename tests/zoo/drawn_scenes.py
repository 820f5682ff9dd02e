"""Scenes drawn by lot: models of several heads that take and give containers, and loops around them of what
people do in whole scripts: targets and averages, pruning, other plans in the midst, several optimizers.

As in ``drawn_loops.py`` a scene is the same for plain torch and for a prepared model.
"""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar

import torch
from torch import nn

import espalier
from tests.zoo.drawn_acts import ACTS, LOSSES, MORE_SCHEDULES, WAYS
from tests.zoo.drawn_bricks import WIDTH
from tests.zoo.drawn_loops import OPTIMIZERS, SCHEDULES
from tests.zoo.drawn_nets import CLASSES, IDS, Given, Net, Weighing, parts_of
from tests.zoo.drawn_widely import away

Tensor = torch.Tensor
LENGTH, STEPS = 4, 5
GROUPS = ("one", "decay", "two", "each")


class Scene:
    """One that a seed draws."""

    optimizers: ClassVar = {name: make for name, make in OPTIMIZERS.items() if name != "fused"}
    schedules = SCHEDULES | MORE_SCHEDULES
    ways, kinds_of_losses, kinds_of_acts = WAYS, LOSSES, ACTS

    def __init__(self, seed: int) -> None:
        lot = random.Random(f"scene {seed}")
        self.seed = seed
        self.optimizer = lot.choice(sorted(self.optimizers))
        self.schedule = lot.choice(sorted(self.schedules))
        self.groups, self.way = lot.choice(GROUPS), lot.choice(sorted(WAYS))
        self.losses = [lot.choice(sorted(LOSSES)) for _ in range(2)]
        self.acts = [
            [lot.choice(sorted(ACTS)) for _ in range(lot.choice([0, 1, 1, 2]))] for _ in range(STEPS)
        ]
        self.rows = [lot.choice([8, 8, 8, 4, 12, 6]) for _ in range(STEPS)]
        self.says()

    def says(self) -> None:
        """Set what it is said to do."""
        self.said = f"{self.optimizer}/{self.schedule}/{self.groups}/{self.way}, {self.losses}, "
        self.said += f"{self.acts}, rows {self.rows}"

    # ---- what it is made of

    def net(self) -> Net:
        """The model, with the same values each time."""
        torch.manual_seed(1)
        random.seed(1)
        return Net(random.Random(f"net {self.seed}")).double()

    def batch(self, number: int, rows: int = 8) -> tuple[dict[str, Any], Tensor]:
        """Named inputs, and classes."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        kind = self.plain.kind
        shape = {"rows": (rows, WIDTH), "long": (rows, LENGTH, WIDTH), "image": (rows, 2, 8, 8)}.get(kind)
        if shape is None:
            x: Tensor = torch.randint(0, IDS, (rows, LENGTH), generator=generator)
        else:
            x = torch.randn(*shape, dtype=torch.float64, generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (rows,), generator=generator)
        mask = torch.arange(LENGTH) < lengths[:, None]
        y = torch.randint(0, CLASSES, (rows,), generator=generator)
        return {"x": x, "mask": mask}, y

    def call(self, model: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The model, as it takes inputs."""
        x, mask = given["x"], given["mask"]
        how = self.plain.takes
        if how == "plain":
            out = model(x, mask)
        elif how == "keys":
            out = model(mask=mask, x=x, flag=True, none=None)
        elif how == "dict":
            out = model({"x": x, "mask": mask, "name": "n", "none": None})
        elif how == "nested":
            out = model((x, [mask, None]))
        else:
            out = model(Given(x, mask, {"n": 3}))
        return parts_of(out)

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """One, or two of which each has a part."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        make = self.optimizers[self.optimizer]
        if self.groups == "two":
            return [
                make([{"params": [p for n, p in named if "head" not in n and "stem" not in n]}]),
                torch.optim.SGD([p for n, p in named if "head" in n or "stem" in n], lr=0.05, momentum=0.5),
            ]
        if self.groups == "decay":
            return [
                make(
                    [
                        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
                        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
                    ]
                )
            ]
        if self.groups == "each":
            return [make([{"params": [p], "lr": 0.01 * (1 + i % 3)} for i, (_, p) in enumerate(named)])]
        return [make([{"params": [p for _, p in named]}])]

    # ---- how it goes

    def begin(self, lay: Any, model: nn.Module) -> None:
        """Lay a model out, with optimizers of its own."""
        self.judge = Weighing().double() if "judged" in self.losses else None
        optims = self.optimizers_of(model)
        if self.judge is not None:
            optims[0].add_param_group({"params": list(self.judge.parameters()), "lr": 0.01})
        self.model, *self.optims = lay(model, *optims)
        self.scheduler = self.schedules[self.schedule](self.optims[0])

    def run(self, lays: Any, folder: str = "", off: float = 0.0) -> list[Any]:
        """The numbers that it gives; ``lays``: ways to lay out, the second for a change of plans."""
        self.starts(lays, folder, off)
        for step in range(STEPS):
            self.goes(step)
        return self.ends()

    def starts(self, lays: Any, folder: str, off: float) -> None:
        """Make the model, perhaps so far off, and lay it out."""
        self.plain = model = self.net()
        if off:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + off * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        self.early = copy.deepcopy(model)
        self.lays, self.folder = lays, folder
        self.begin(lays[0], model)
        self.out: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.changed = False
        self.is_plain = not isinstance(self.model, espalier.EngineModule)

    def goes(self, step: int) -> None:
        """One step, and what is done after it."""
        self.step = step
        self.steps()
        for act in self.acts[step]:
            self.kinds_of_acts[act](self)

    def steps(self) -> None:
        """A step of optimizers and schedule."""
        x, y = self.batch(self.step, self.rows[self.step])
        lost = self.ways[self.way](self, x, y)
        self.out.append(lost.item())
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self.out[-1])
        elif self.scheduler is not None:
            self.scheduler.step()

    def ends(self) -> list[Any]:
        """All numbers, the model's at last."""
        state = self.model.state_dict()
        return [*self.out, *(state[name] for name in sorted(state) if state[name].ndim)]

    def loss(self, x: Any, y: Tensor) -> Tensor:
        """The loss of this step, not gone back."""
        return self.kinds_of_losses[self.losses[self.step % 2]](self, x, y)

    def went_back(self, x: Any, y: Tensor) -> Tensor:
        """The loss of this step, gone back; its gradients are all that there are."""
        self.clear()
        loss = self.loss(x, y)
        loss.backward()
        return loss

    def clear(self) -> None:
        """No gradients."""
        for optimizer in self.optims:
            optimizer.zero_grad()

    def update(self) -> None:
        """A step of all optimizers."""
        for optimizer in self.optims:
            optimizer.step()

    def params(self) -> list[nn.Parameter]:
        """Those that are trained now."""
        return [p for p in self.model.parameters() if p.requires_grad]


def plans(seed: int, world: int = 2) -> list[dict[str, Any]]:
    """Two plans for it, of so many ranks."""
    lot = random.Random(f"plans of scene {seed}" + ("" if world == 2 else f" on {world}"))
    return [_plan(lot, world) for _ in range(2)]


def _plan(lot: random.Random, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(world.bit_length() - 1):
        axis = lot.choice(["data", "data", "data", "tensor", "tensor", "pipe", "pipe", "replicate"])
        axis = "data" if axis == "pipe" and "pipe" in found else axis
        found[axis] = 2 * found.get(axis, 1)
    found["zero"] = lot.choice([0, 0, 1, 2, 3, 3] if found.get("replicate", 1) == 1 else [1, 2, 3])
    if found.get("tensor") == 4 and lot.random() < 0.5:
        found["tensor_mode"] = "2d"
    elif "tensor" in found:
        found["sequence_parallel"] = lot.choice([False, True, "auto"])
    if "pipe" in found:
        found["schedule"] = lot.choice(["1f1b", "gpipe", "zb-h1"])
    elif found["zero"] and lot.random() < 0.3:
        found["offload"] = away(found["zero"], lot)
    found["recompute"] = lot.choice(["none", "none", "full", "selective"])
    found["chunk_megabytes"] = lot.choice([25.0, 0.001])
    found["prefetch_megabytes"] = lot.choice([50.0, 0.0])
    return found
