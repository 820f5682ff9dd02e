"""Loops drawn by lot, as people write them around a model that is prepared: optimizers of several kinds, what
is done with gradients, parameters and states between steps, and several losses a step.

A loop is the same for plain torch and for a prepared model: ``Loop(seed).run(lay)`` gives numbers to compare.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import espalier
from tests.zoo.drawn import BRICKS as FIRST
from tests.zoo.drawn_bricks import BRICKS as MORE
from tests.zoo.drawn_bricks import WIDTH
from tests.zoo.drawn_widely import away

Tensor = torch.Tensor
Lay = Callable[..., Any]  # a model and optimizers, as they are or prepared
CLASSES, ROWS, STEPS = 5, 8, 5
# their values are not near ties, they draw no random numbers, and leave nothing of the loss on themselves
LEFT_OUT = ("again", "hasty", "noisy", "chosen", "priced", "quantized", "experts", "counted", "slope")


class Body(nn.Module):
    """Bricks, and a head that people call by itself, too."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__()
        known = {name: brick for name, brick in {**FIRST, **MORE}.items() if name not in LEFT_OUT}
        names = [lot.choice(["plain", *sorted(known)]) for _ in range(lot.randint(1, 3))]
        made = [known[name](lot) if name in known else nn.Linear(WIDTH, WIDTH) for name in names]
        self.blocks = nn.ModuleList(made)
        self.names = [f"{n}.{m.how}" if hasattr(m, "how") else n for n, m in zip(names, made, strict=True)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def batch(number: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (rows,), generator=generator)


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, eps=1e-4),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True, eps=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-3),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=1e-4),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2, eps=1e-3),
    "foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, foreach=True),
    "loop": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-4, foreach=False),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2, t0=1),
    "damped": lambda groups: torch.optim.SGD(groups, lr=0.03, dampening=0.1, momentum=0.6),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.1, eps=1e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, eps=1e-3, decoupled_weight_decay=True),
    "rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), eps=1e-4),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "warm": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=3),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "none": lambda o: None,
}
GROUPS = ("one", "decay", "rates", "each", "part")
ZEROS = ("before", "after", "zeros", "model", "model_zeros", "none", "zero_", "closure", "seldom")


def groups_of(model: nn.Module, how: str) -> list[dict[str, Any]]:
    """The parameters in groups."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if how == "decay":
        return [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
        ]
    if how == "rates":
        return [
            {"params": [p for n, p in named if "head" in n], "lr": 0.02},
            {"params": [p for n, p in named if "head" not in n]},
        ]
    if how == "each":
        return [{"params": [p], "lr": 0.01 * (1 + i % 3)} for i, (_, p) in enumerate(named)]
    if how == "part":
        return [{"params": [p for n, p in named if "norm" not in n]}]
    return [{"params": [p for _, p in named]}]


def optimizers_of(model: nn.Module, kind: str, groups: str) -> list[torch.optim.Optimizer]:
    """One, or one for matrices and one for the rest."""
    if kind != "muon":
        return [OPTIMIZERS[kind](groups_of(model, groups))]
    trained = [p for p in model.parameters() if p.requires_grad]
    wide = [p for p in trained if p.ndim == 2]
    rest = [p for p in trained if p.ndim != 2]
    return [torch.optim.Muon(wide, lr=0.02), torch.optim.AdamW(rest, lr=0.01, eps=1e-4)]


class Loop:
    """One that a seed draws; what it is said to do is in ``said``."""

    def __init__(self, seed: int) -> None:
        lot = random.Random(f"loop {seed}")
        self.seed = seed
        self.optimizer, self.schedule = (
            lot.choice([*sorted(OPTIMIZERS), "muon"]),
            lot.choice(sorted(SCHEDULES)),
        )
        self.groups, self.zero = lot.choice(GROUPS), lot.choice(ZEROS)
        self.loss = [lot.choice(sorted(LOSSES)) for _ in range(2)]
        self.grads = [lot.choice(sorted(GRADIENTS)) for _ in range(2)]
        self.acts = [
            [lot.choice(sorted(ACTS)) for _ in range(lot.choice([0, 1, 1, 2]))] for _ in range(STEPS)
        ]
        self.rows = [lot.choice([ROWS, ROWS, ROWS, 4, 12]) for _ in range(STEPS)]
        self.said = (
            f"{self.optimizer}/{self.schedule}/{self.groups}/zero {self.zero}, {self.loss}, {self.grads}, "
        )
        self.said += f"{self.acts}, rows {self.rows}"

    def run(self, lay: Lay, folder: str = "", off: float = 0.0) -> list[Any]:
        """The numbers that it gives, perhaps of parameters that are so far off."""
        torch.manual_seed(1)
        random.seed(1)
        model = Body(random.Random(f"body {self.seed}")).double()
        if off:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + off * torch.randn_like(p))
        self.names = model.names
        self.early = copy.deepcopy(model)
        self.model, *self.optims = lay(model, *optimizers_of(model, self.optimizer, self.groups))
        self.scheduler = SCHEDULES[self.schedule](self.optims[0])
        self.out: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.folder, self.is_plain = folder, not isinstance(self.model, espalier.EngineModule)
        for self.step in range(STEPS):
            self._trained()
            for act in self.acts[self.step]:
                ACTS[act](self)
        state = self.model.state_dict()
        return [*self.out, *(state[name] for name in sorted(state))]

    def params(self) -> list[nn.Parameter]:
        """Those that are trained now."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _trained(self) -> None:
        step = self.step
        x, y = batch(10 * self.seed + step, self.rows[step])
        if self.zero == "closure":

            def closure() -> Tensor:
                self.cleared()
                self.lost = LOSSES[self.loss[step % 2]](self, x, y)
                GRADIENTS[self.grads[step % 2]](self)
                return self.lost

            self.optims[0].step(closure)
            for optimizer in self.optims[1:]:
                optimizer.step()
        else:
            self.cleared()
            self.lost = LOSSES[self.loss[step % 2]](self, x, y)
            GRADIENTS[self.grads[step % 2]](self)
            if self.zero != "seldom" or step % 2:
                for optimizer in self.optims:
                    optimizer.step()
        self.out.append(self.lost.item())
        if self.zero == "after":
            self.cleared("closure")
        if self.schedule == "plateau":
            self.scheduler.step(self.lost.item())
        elif self.scheduler is not None:
            self.scheduler.step()

    def cleared(self, how: str = "") -> None:
        """Without gradients, by one of the ways that there are."""
        how = how or self.zero
        if how in ("before", "closure") or (how == "seldom" and self.step % 2 == 0):
            for optimizer in self.optims:
                optimizer.zero_grad()
        elif how == "zeros":
            for optimizer in self.optims:
                optimizer.zero_grad(set_to_none=False)
        elif how in ("model", "model_zeros"):
            self.model.zero_grad(set_to_none=how == "model")
        elif how in ("none", "zero_"):
            for p in self.model.parameters():
                if how == "none":
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()


# ---- losses: each goes back, and gives what it was


def _plain(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(loop.model(x), y)
    loss.backward()
    return loss


def _two(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """Two losses of one call, one after the other."""
    out = loop.model(x)
    first, second = F.cross_entropy(out, y), out.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first


def _twice(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """Two calls, two backward passes."""
    first = F.cross_entropy(loop.model(x), y)
    first.backward()
    (0.5 * loop.model(x * 0.5).square().mean()).backward()
    return first


def _views(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """Two calls in one loss."""
    one, other = loop.model(x), loop.model(x + 0.1)
    loss = F.cross_entropy(one, y) + F.mse_loss(one, other.detach()) + other.softmax(-1).square().mean()
    loss.backward()
    return loss


def _decayed(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(loop.model(x), y) + 0.01 * sum(p.square().sum() for p in loop.params())
    loss.backward()
    return loss


def _parts(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """A batch in parts, whose gradients add up."""
    total = torch.zeros(())
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(loop.model(a), b) / 2
        loss.backward()
        total = total + loss.detach()
    return total


def _weighed(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, len(y))
    losses = F.cross_entropy(loop.model(x), y, reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    loss.backward()
    return loss


def _penalty(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """On the gradient of the inputs."""
    x = x.clone().requires_grad_()
    out = loop.model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = F.cross_entropy(out, y) + 0.1 * slope.square().sum(-1).mean()
    loss.backward()
    return loss


def _by_grad(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """Gradients that are asked for and put in their places."""
    loss = F.cross_entropy(loop.model(x), y)
    found = torch.autograd.grad(loss, loop.params(), allow_unused=True)
    for p, g in zip(loop.params(), found, strict=True):
        # one tensor may be several's; and torch's fused step takes memory as it lies
        p.grad = None if g is None else g.clone(memory_format=torch.contiguous_format)
    return loss


def _attacked(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    F.cross_entropy(loop.model(x), y).backward()
    assert x.grad is not None
    loss = F.cross_entropy(loop.model(x.detach() + 0.1 * x.grad), y)
    loss.backward()
    return loss


def _target(loop: Loop, x: Tensor, y: Tensor) -> Tensor:
    """Of what a copy made before says."""
    with torch.no_grad():
        due = loop.early(x).softmax(-1)
    loss = F.kl_div(loop.model(x).log_softmax(-1), due, reduction="batchmean") + F.cross_entropy(
        loop.model(x), y
    )
    loss.backward()
    return loss


LOSSES: dict[str, Callable[[Loop, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "plain again": _plain,
    "two": _two,
    "twice": _twice,
    "views": _views,
    "decayed": _decayed,
    "parts": _parts,
    "weighed": _weighed,
    "penalty": _penalty,
    "by grad": _by_grad,
    "attacked": _attacked,
    "target": _target,
}

# ---- what is done with gradients


def _clipped(loop: Loop) -> None:
    loop.out.append(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5))


def _clipped_values(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.0213)


def _scaled(loop: Loop) -> None:
    for p in loop.params():
        if p.grad is not None:
            p.grad.mul_(0.5)


def _through_data(loop: Loop) -> None:
    for p in loop.params():
        if p.grad is not None:
            p.grad.data.add_(p.data, alpha=0.01)


def _replaced(loop: Loop) -> None:
    for p in loop.params():
        if p.grad is not None:
            p.grad = p.grad * 0.9 + 0.001


def _normed(loop: Loop) -> None:
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in loop.params() if p.grad is not None]).norm()
        for p in loop.params():
            if p.grad is not None:
                p.grad /= norm + 1.0
    loop.out.append(norm)


def _central(loop: Loop) -> None:
    for p in loop.params():
        if p.grad is not None and p.ndim > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def _some_none(loop: Loop) -> None:
    for i, p in enumerate(loop.params()):
        if i % 3 == 0:
            p.grad = None


def _of_copy(loop: Loop) -> None:
    for p in loop.params():
        if p.grad is not None:
            p.grad.copy_(p.grad.clone().clamp(-0.05, 0.04))


GRADIENTS: dict[str, Callable[[Loop], None]] = {
    "as they are": lambda loop: None,
    "as they are 2": lambda loop: None,
    "clip norm": _clipped,
    "clip value": _clipped_values,
    "scaled": _scaled,
    "data": _through_data,
    "replaced": _replaced,
    "normed": _normed,
    "central": _central,
    "some none": _some_none,
    "copied": _of_copy,
}

# ---- what is done between steps


def _evaluated(loop: Loop, rows: int = ROWS) -> None:
    loop.model.eval()
    with torch.no_grad():
        x, y = batch(999, rows)
        loop.out.append(F.cross_entropy(loop.model(x), y).item())
    loop.model.train()


def _inferred(loop: Loop) -> None:
    loop.model.eval()
    with torch.inference_mode():
        loop.out.append((loop.model(batch(998, 6)[0]).argmax(-1) == batch(998, 6)[1]).double().mean().item())
    loop.model.train()


def _watched(loop: Loop) -> None:
    """A pass in the training's mode that no gradient goes through."""
    with torch.no_grad():
        loop.out.append(loop.model(batch(997)[0]).mean().item())


@torch.no_grad()
def _clamp(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.clamp_(-0.31, 0.29)


def _data(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data.mul_(0.95)


def _put(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data = p.data * 0.95


@torch.no_grad()
def _copied(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.copy_(p * 0.9 + 0.01)


@torch.no_grad()
def _row(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.ndim:
            p[0] = 0.05


def _anew(loop: Loop) -> None:
    nn.init.constant_(loop.model.head.bias, 0.1)
    nn.init.eye_(loop.model.head.weight)


def _averaged(loop: Loop) -> None:
    """Into a copy that was made before."""
    with torch.no_grad():
        for a, p in zip(loop.early.parameters(), loop.model.parameters(), strict=True):
            a.mul_(0.7).add_(p, alpha=0.3)
        loop.out.append(loop.early(batch(996)[0]).mean())


def _averaged_anew(loop: Loop) -> None:
    """Into one that is made now."""
    if "copy" not in loop.kept:
        loop.kept["copy"] = copy.deepcopy(loop.model).requires_grad_(False)
    else:
        held = loop.model.state_dict()
        mean = loop.kept["copy"].state_dict()
        loop.kept["copy"].load_state_dict(
            {k: v.lerp(held[k], 0.3) if v.is_floating_point() else held[k] for k, v in mean.items()}
        )
    loop.kept["copy"].eval()
    loop.out.append(loop.kept["copy"](batch(996)[0]).mean().item())


def _frozen(loop: Loop) -> None:
    is_free = loop.model.head.weight.requires_grad
    for p in loop.model.head.parameters():
        p.requires_grad_(not is_free)
        p.grad = None


def _frozen_block(loop: Loop) -> None:
    loop.model.norm.requires_grad_(not loop.model.norm.weight.requires_grad)


def states_of(loop: Loop) -> tuple[Any, list[Any]]:
    """Of the model and its optimizers."""
    return loop.model.state_dict(), [optimizer.state_dict() for optimizer in loop.optims]


def put_back(loop: Loop, states: tuple[Any, list[Any]]) -> None:
    """What :func:`states_of` gave."""
    loop.model.load_state_dict(states[0])
    for optimizer, state in zip(loop.optims, states[1], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))


def _put_aside(loop: Loop) -> None:
    """The model's and the optimizer's states, or back to those."""
    if "states" in loop.kept:
        put_back(loop, loop.kept["states"])
    else:
        loop.kept["states"] = copy.deepcopy(states_of(loop))


def _clones(loop: Loop) -> None:
    """Values of parameters, kept by name, or back to those."""
    if "clones" in loop.kept:
        with torch.no_grad():
            for name, p in loop.model.named_parameters():
                p.copy_(loop.kept["clones"][name])
    else:
        loop.kept["clones"] = {name: p.detach().clone() for name, p in loop.model.named_parameters()}


def _saved(loop: Loop) -> None:
    """By the engine, or by torch's ways where there is none; or back to that."""
    if loop.zero == "seldom":  # no checkpoint holds gradients
        return
    if loop.is_plain:
        if "saved" not in loop.kept:
            loop.kept["saved"] = copy.deepcopy(states_of(loop))
        else:
            put_back(loop, loop.kept["saved"])
    elif "saved" not in loop.kept:
        loop.kept["saved"] = f"{loop.folder}/{loop.step}"
        loop.model.engine.save(loop.kept["saved"])
    else:
        loop.model.engine.load(loop.kept["saved"])


def _rate(loop: Loop) -> None:
    for group in loop.optims[-1].param_groups:
        group["lr"] *= 0.7


def _told(loop: Loop) -> None:
    """Numbers that a log has."""
    loop.out += [sum(p.norm() for p in loop.model.parameters()), loop.optims[0].param_groups[0]["lr"]]
    loop.out.append(nn.utils.parameters_to_vector(loop.model.parameters()).abs().max())


def _states(loop: Loop) -> None:
    for state in loop.optims[0].state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                value.mul_(0.9)


def _as_vector(loop: Loop) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(loop.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.97, loop.model.parameters())


def _second(loop: Loop) -> None:
    """A step more, of another batch, through the head alone."""
    if not loop.model.head.weight.requires_grad:
        return
    loop.cleared("closure")
    F.cross_entropy(loop.model.head(batch(995)[0]), batch(995)[1]).backward()
    for optimizer in loop.optims:
        optimizer.step()


def _unused(loop: Loop) -> None:
    """A loss that no step is made of."""
    F.cross_entropy(loop.model(batch(994)[0]), batch(994)[1]).backward()
    loop.out += [p.grad.square().sum() for p in loop.params() if p.grad is not None]
    loop.cleared("closure")


def _states_told(loop: Loop) -> None:
    states = loop.optims[0].state_dict()["state"]
    for number in sorted(states):
        state = states[number]
        loop.out += [state[k].abs().sum() for k in sorted(state) if getattr(state[k], "ndim", 0)]


def _hooked(loop: Loop) -> None:
    """A hook of a module that changes what it gives, or it is taken away."""
    if "hook" in loop.kept:
        loop.kept.pop("hook").remove()
    else:
        loop.kept["hook"] = loop.model.norm.register_forward_hook(lambda module, given, out: out * 0.9)


def _parameter_hooked(loop: Loop) -> None:
    if "hook of p" in loop.kept:
        loop.kept.pop("hook of p").remove()
    else:
        loop.kept["hook of p"] = loop.model.head.weight.register_hook(lambda grad: grad.clamp(-0.03, 0.02))


def _grown(loop: Loop) -> None:
    """A layer more, which the optimizer is given."""
    if loop.scheduler is not None:  # it knows how many groups there are
        return
    layer = nn.Linear(WIDTH, WIDTH).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.03)
    loop.model.blocks.append(layer)
    loop.early.blocks.append(copy.deepcopy(layer))
    loop.optims[-1].add_param_group({"params": list(layer.parameters()), "lr": 0.02})
    loop.kept.clear()  # what was kept is of another model


def _calm(loop: Loop) -> None:
    """Norms of blocks stay in the mode of evaluation."""
    loop.model.blocks.train(not loop.model.blocks.training)


def _applied(loop: Loop) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, 0.02)

    loop.model.apply(init)


def _all_frozen(loop: Loop) -> None:
    """All but the head, or nothing."""
    is_free = loop.model.norm.weight.requires_grad
    for name, p in loop.model.named_parameters():
        if not name.startswith("head"):
            p.requires_grad_(not is_free)


def _exchanged(loop: Loop) -> None:
    norm = loop.model.norm
    norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


def _lists(loop: Loop) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(loop.model.parameters()), 0.99)
        loop.out.append(torch.stack(torch._foreach_norm(list(loop.model.parameters()))).sum())


@torch.no_grad()
def _factored(loop: Loop) -> None:
    """Of a matrix that is kept near a rank."""
    weight = loop.model.head.weight
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    weight.copy_(u @ torch.diag(s.clamp(max=0.4)) @ v)


def _some_loaded(loop: Loop) -> None:
    held = {name: x * 0.9 for name, x in loop.model.state_dict().items() if name.startswith("head")}
    loop.model.load_state_dict(held, strict=False)


def _gradients_told(loop: Loop) -> None:
    loop.out += [0.0 if p.grad is None else p.grad.sum() for p in loop.params()]


def _filed(loop: Loop) -> None:
    """By torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    loop.early.load_state_dict(torch.load(file, weights_only=True))
    loop.out.append(loop.early(batch(993)[0]).sum())


def _through_head(loop: Loop) -> None:
    """A loss of a part's call, beside the model's, whose gradients the next step finds, or drops."""
    (
        0.1 * loop.model.head(torch.ones(3, WIDTH)).square().mean() + loop.model.norm.weight.sum() * 0.01
    ).backward()


ACTS: dict[str, Callable[[Loop], None]] = {
    "evaluate": _evaluated,
    "evaluate 4": lambda loop: _evaluated(loop, 4),
    "evaluate 7": lambda loop: _evaluated(loop, 7),
    "infer": _inferred,
    "watch": _watched,
    "clamp": _clamp,
    "data": _data,
    "put": _put,
    "copy": _copied,
    "row": _row,
    "anew": _anew,
    "average": _averaged,
    "average anew": _averaged_anew,
    "freeze": _frozen,
    "freeze norm": _frozen_block,
    "put aside": _put_aside,
    "clones": _clones,
    "save": _saved,
    "rate": _rate,
    "tell": _told,
    "states": _states,
    "vector": _as_vector,
    "second": _second,
    "tell states": _states_told,
    "hook": _hooked,
    "hook of p": _parameter_hooked,
    "grow": _grown,
    "calm": _calm,
    "apply": _applied,
    "freeze all": _all_frozen,
    "exchange": _exchanged,
    "lists": _lists,
    "factor": _factored,
    "load some": _some_loaded,
    "tell gradients": _gradients_told,
    "file": _filed,
    "through head": _through_head,
    "unused": _unused,
}


# of a batch's rows together, or of how often they were called: of micro-batches they are others
OF_BATCHES = (
    "normed bank follower handled spread.own spread.batch spread.peak hooked.activation hooked.parameter "
    "taken.roll taken.pairs taken.cumsum taken.diag taken.put waves.rows written.row beside.mixed"
).split()


def plan(seed: int) -> dict[str, Any]:
    """A plan for it, of two ranks."""
    lot = random.Random(f"plan of loop {seed}")
    axis = lot.choice(["data", "data", "data", "tensor", "tensor", "pipe", "pipe", "replicate"])
    found: dict[str, Any] = {axis: 2}
    if axis == "data":
        found["zero"] = lot.choice([0, 1, 2, 3, 3])
    elif axis == "tensor":
        found |= {"zero": lot.choice([0, 0, 1, 3]), "sequence_parallel": lot.choice([False, True])}
    elif axis == "replicate":
        found["zero"] = lot.choice([1, 2, 3])
    else:
        found |= {"zero": lot.choice([0, 0, 1, 3]), "schedule": lot.choice(["1f1b", "gpipe", "zb-h1"])}
        names = Body(random.Random(f"body {seed}")).names
        is_of_rows = not any(name.startswith(of) for name in names for of in OF_BATCHES)
        found["accumulate"] = lot.choice([1, 1, 1, 2]) if is_of_rows else 1
    found["recompute"] = lot.choice(["none", "none", "full", "selective"])
    found["chunk_megabytes"] = lot.choice([25.0, 0.001])
    if axis == "data" and found["zero"] and lot.random() < 0.3:
        found["offload"] = away(found["zero"], lot)
    return found
