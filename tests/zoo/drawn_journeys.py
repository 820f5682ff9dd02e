"""Journeys drawn by lot: courses (``drawn_courses.py``) that stop, and go on under another plan or on another
number of ranks, against one process that never stopped.

While a step is made, at any moment of it, a program looks: whole weights, files, copies, evaluations, words
one by one. Parts are frozen and come back, copies follow the weights, the engine's own calls train; and some
compute in low precision, against an engine on one process that does, too.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from espalier import full_tensor
from tests.zoo import drawn_mixes
from tests.zoo.drawn_acts import _put_back, _states_of
from tests.zoo.drawn_courses import MORE_OF_BATCHES, Course
from tests.zoo.drawn_loops import OF_BATCHES
from tests.zoo.drawn_nets import parts_of
from tests.zoo.drawn_scenes import STEPS
from tests.zoo.drawn_turns import _decoded

Tensor = torch.Tensor
# what makes other parameters, or other groups of them: a program would have to make these again
CHANGING = (
    "add group, later optimizer, lora, new head, norm of weight, parametrize, plain again, prune".split(", ")
)
LOW = ("autocast", "scaled", "bfloat16", "autocast-bfloat16")
LOW_LOSSES = ("both", "one head", "hardest", "mixed", "triplets", "covariance", "twice", "ragged", "dropped")
OF_DOUBLES = "mask rows, lora, new head, shrink, parts, move, move 2, move by engine, norm of weight".split(
    ", "
)
UNSAVED = ("handled.hidden", "spread.own", "spread.peak")  # what they remember is in no state dict
MOMENTS = 40  # so many there may be, in five steps


class Journey(Course):
    """One that a seed draws: ``stops`` says after which steps it stops, and how it is saved there."""

    group = "journey"
    dtype = torch.float64

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        lot = random.Random(f"journey of {seed}")
        self.precision = lot.choice(LOW) if lot.random() < 0.2 else ""
        if self.precision:
            self.dtype, self.losses = torch.float32, [lot.choice(LOW_LOSSES) for _ in range(2)]
            self.acts = [[act for act in acts if act not in OF_DOUBLES] for acts in self.acts]
            self.way = self.way if self.way not in ("noisy", "scaled") else "plain"
        number = 0 if set(self.net().names) & set(UNSAVED) else lot.choice([0, 1, 1, 2])
        after = sorted(lot.sample(range(STEPS - 1), number))
        how = ["engine", "engine", "asynchronous", "laid out", "hand"][: 4 if self.precision else 5]
        self.stops = {step: lot.choice(how) for step in after}
        self.looks = {lot.randrange(MOMENTS): lot.choice(sorted(LOOKS)) for _ in range(lot.randint(0, 6))}
        if self.precision == "scaled":
            self.way = "scaled"
        self.follows = lot.random() < 0.4
        self.kinds_of_acts = self.kinds_of_acts | ACTS
        for acts in self.acts:
            if lot.random() < 0.4:
                acts.append(lot.choice(sorted(ACTS)))
        for step in range(max(after, default=-1) + 1):
            self.acts[step] = [act for act in self.acts[step] if act not in CHANGING]
        if lot.random() < 0.3 and self.way not in ("closure", "scaled"):
            self.ways, self.way = self.ways | WAYS, lot.choice(sorted(WAYS))
        self.says()
        self.said += (
            f" stops {self.stops} looks {self.looks}" + " follows" * self.follows + f" {self.precision}"
        )

    # ---- what it is made of

    def net(self) -> Any:
        return super().net().to(self.dtype)

    def batch(self, number: int, rows: int = 8) -> tuple[dict[str, Any], Tensor]:
        given, y = super().batch(number, rows)
        return {n: x.to(self.dtype) if x.is_floating_point() else x for n, x in given.items()}, y

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        self.made = _trained(model)
        return super().optimizers_of(model)

    def begin(self, lay: Any, model: nn.Module) -> None:
        has_engine = isinstance(lay, partial)
        super().begin(
            partial(lay, loss_fn=_told) if has_engine and self.way.startswith("engine") else lay, model
        )

    # ---- moments

    def starts(self, lays: Any, folder: str, off: float) -> None:
        self.moments, self.is_in_step = 0, False
        super().starts(lays, folder, off)

    def steps(self) -> None:
        if self.way.startswith("engine") and not self.is_plain:
            self._attaches()
        self.is_in_step = True
        self.looks_on()
        super().steps()
        self.is_in_step = False
        if self.follows:
            _followed(self)

    def _attaches(self) -> None:
        """Let the engine know optimizers that were made anew."""
        if not all(map(self.model.engine.has_optimizer, self.optims)):
            self.model.engine.attach(self.optims, instead=True)

    def looks_on(self, moments: int = 1) -> None:
        """So many moments more, at each of which something may be looked at."""
        for _ in range(moments if self.is_in_step else 0):
            look = self.looks.get(self.moments)
            self.moments, self.is_in_step = self.moments + 1, False
            if look is not None:
                LOOKS[look](self)
            self.is_in_step = True

    def call(self, model: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        self.looks_on()
        if self.precision in ("autocast", "scaled"):
            dtype = torch.bfloat16 if self.precision == "autocast" else torch.float16
            with torch.autocast("cpu", dtype):
                found = super().call(model, given)
        else:
            found = super().call(model, given)
        if self.precision:
            found = tuple(x.float() for x in found)  # type: ignore[assignment]
        if all(b.ndim == 0 for b in self.plain.buffers()):  # in a pipeline the call has written none yet
            self.looks_on()
        return found

    def update(self) -> None:
        self.looks_on()
        super().update()

    # ---- stops

    def legs(self) -> list[range]:
        """The steps of each leg."""
        begins = [0, *(step + 1 for step in self.stops)]
        return [range(a, b) for a, b in zip(begins, [*begins[1:], STEPS], strict=True)]

    def goes(self, step: int) -> None:
        super().goes(step)
        if step in self.stops:
            self._forgets()

    def _forgets(self) -> None:
        """What no checkpoint has."""
        self.clear()
        for held in self.kept.values():
            if hasattr(held, "remove") and not isinstance(held, list):
                held.remove()  # a hook
        kept = {name: self.kept[name] for name in ("follower", "frozen", "scaler") if name in self.kept}
        self.kept.clear()
        self.kept |= kept

    def _named(self) -> dict[str, Any]:
        """What goes on beside the model and its optimizers, and can be loaded."""
        found = {"schedule": self.scheduler, "judge": self.judge, "follower": self.kept.get("follower")}
        found["scaler"] = self.kept.get("scaler")
        return {name: x for name, x in found.items() if x is not None}

    def leg(self, number: int, lays: Any, folder: str, rank: int) -> list[Any]:
        """The numbers of one leg; of the last one all those at the end, too."""
        at = f"{folder}/leg"
        if number == 0:
            self.starts(lays, folder, 0.0)
        else:
            self._goes_on(lays, folder, f"{at}{number - 1}", list(self.stops.values())[number - 1])
        steps = self.legs()[number]
        for step in steps:
            self.goes(step)
        if steps.stop == STEPS:
            return self.ends()
        self._saves(f"{at}{number}", list(self.stops.values())[number], rank)
        return self.out

    def _saves(self, at: str, how: str, rank: int) -> None:
        beside = {
            "made": self.made,
            "trained": _trained(self.model),
            "is training": self.model.training,
            "frozen": self.kept.get("frozen", False),
            "named": sorted(self._named()),
            "moments": self.moments,
            "python": random.getstate(),
        }
        self._attaches()
        if how == "hand":
            named = {name: _whole(x.state_dict()) for name, x in self._named().items()}
            states = {"all": _states_of(self), "named": named, "random": torch.get_rng_state()}
            if rank == 0:
                torch.save(states | {"beside": beside}, f"{at}.pt")
            return
        is_late = how == "asynchronous"
        self.model.engine.save(at, asynchronous=is_late, **self._named(), beside=beside)
        if is_late:
            self.model.engine.wait_saved()

    def _goes_on(self, lays: Any, folder: str, at: str, how: str) -> None:
        """A new model and optimizers, in another process, from what was saved."""
        try:
            states = torch.load(f"{at}.pt", weights_only=False)
        except FileNotFoundError:
            states = None
        self.starts(lays, folder, 0.0)
        if how == "laid out" and self.way.startswith("engine"):
            x, y = self.batch(0)
            self.model.engine.lay_out(self.model.engine.cut((_inputs(self, x), y))[0])
        beside = self._loads(at) if states is None else self._takes(states)
        self._frees(beside["trained"])
        self.model.train(beside["is training"])
        self.moments = beside["moments"]
        if beside["frozen"]:
            self.kept["frozen"] = True
        version, numbers, gauss = beside["python"]
        random.setstate((version, tuple(numbers), gauss))

    def _made_again(self, beside: dict[str, Any]) -> dict[str, Any]:
        """Optimizers as they were made, and what goes on beside."""
        if beside["made"] != self.made:
            self._frees(beside["made"])
            self.begin(self.lays[0], self.net_made(beside["made"]))
        if "follower" in beside["named"]:
            self.kept["follower"] = copy.deepcopy(self.model).requires_grad_(False)
        if "scaler" in beside["named"]:
            self.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return {name: x for name, x in self._named().items() if name in beside["named"]}

    def net_made(self, names: list[str]) -> nn.Module:
        """The model, of which these are trained."""
        self.plain = model = self.net()
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
        return model

    def _frees(self, names: list[str]) -> None:
        for name, p in self.model.named_parameters():
            p.requires_grad_(name in names)

    def _loads(self, at: str) -> dict[str, Any]:
        beside = dict(self.model.engine.load(at, model_only=True)["beside"])
        self.model.engine.load(at, **self._made_again(beside))
        return beside

    def _takes(self, states: dict[str, Any]) -> dict[str, Any]:
        beside: dict[str, Any] = states["beside"]
        named = self._made_again(beside)
        self._frees(beside["trained"])
        _put_back(self, states["all"])
        for name, x in named.items():
            x.load_state_dict(states["named"][name])
        torch.set_rng_state(states["random"])
        return beside


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, of plain whole tensors."""
    return {n: full_tensor(x) if isinstance(x, Tensor) else copy.deepcopy(x) for n, x in state.items()}


def _trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


# ---- looks, which change nothing


def _sums(state: dict[str, Any]) -> list[Tensor]:
    """A number for each of a state dict, but for counts of calls."""
    return [x.detach().double().abs().mean() for _, x in sorted(state.items()) if x.numel() and x.ndim]


def _state(s: Journey) -> None:
    s.out += _sums(s.model.state_dict())


def _full(s: Journey) -> None:
    s.out += _sums(s.model.state_dict() if s.is_plain else s.model.engine.full_state_dict())


def _exported(s: Journey) -> None:
    if s.is_plain:
        s.out += _sums(s.model.state_dict())
        return
    path = f"{s.folder}/export{s.step}-{s.moments}-{len(s.out)}.pt"
    s.model.engine.export(path, "torch")
    s.out += _sums(torch.load(path))


def _filed(s: Journey) -> None:
    file = io.BytesIO()
    torch.save(s.model.state_dict(), file)
    file.seek(0)
    s.out += _sums(torch.load(file))


def _evaluated(s: Journey) -> None:
    was = s.model.training
    s.model.eval()
    with torch.no_grad():
        x, y = s.batch(960, 6)
        logits, value, _ = s.call(s.model, x)
        s.out += [F.cross_entropy(logits, y).item(), value.clone()]
    s.model.train(was)


def _copied(s: Journey) -> None:
    twin = copy.deepcopy(s.model).eval()
    with torch.no_grad():
        s.out.append(s.call(twin, s.batch(961, 4)[0])[0])


def _full_model(s: Journey) -> None:
    twin = (copy.deepcopy(s.model) if s.is_plain else s.model.engine.full_model()).eval()
    with torch.no_grad():
        s.out.append(s.call(twin, s.batch(962, 4)[0])[0])


def _predicted(s: Journey) -> None:
    was = s.model.training
    s.model.eval()
    x, _ = s.batch(963, 4)
    if s.is_plain:
        with torch.no_grad():
            s.out.append(s.call(s.model, x)[0])
    else:
        s.out.append(parts_of(s.model.engine.predict(_inputs(s, x)))[0])
    s.model.train(was)


def _gradients(s: Journey) -> None:
    named = sorted(s.model.named_parameters())
    if s.is_plain or s.way == "micro":
        found = {name: p.grad for name, p in named}
    else:
        found = s.model.engine.full_gradients()
    if s.way != "micro":
        s.out += [0.0 if found.get(n) is None else found[n].norm() for n, _ in named]  # type: ignore[union-attr]


def _optimizers_told(s: Journey) -> None:
    for optimizer in s.optims:
        state = optimizer.state_dict()["state"]
        for number in sorted(state):
            s.out += _sums({n: x for n, x in state[number].items() if isinstance(x, Tensor)})


def _decoded_meanwhile(s: Journey) -> None:
    was = s.model.training
    _decoded(s)
    s.model.train(was)


def _saved(s: Journey) -> None:
    """Where there are no gradients: a checkpoint that nobody loads."""
    if not s.is_plain and all(p.grad is None for p in s.model.parameters()):
        s.model.engine.save(f"{s.folder}/aside", asynchronous=s.seed % 2 == 0, keep=1)


LOOKS: dict[str, Callable[[Journey], None]] = {
    "state": _state,
    "full": _full,
    "export": _exported,
    "file": _filed,
    "evaluate": _evaluated,
    "copy": _copied,
    "full model": _full_model,
    "predict": _predicted,
    "gradients": _gradients,
    "optimizers": _optimizers_told,
    "decode": _decoded_meanwhile,
    "save": _saved,
}

# ---- the engine's own calls


def _inputs(s: Journey, x: dict[str, Any]) -> Any:
    """What the model is called with, as the engine takes it."""
    if s.plain.takes == "plain":
        return x["x"], x["mask"]
    if s.plain.takes in ("keys", "dict"):
        return {"x": x["x"], "mask": x["mask"]}
    return ((x["x"], [x["mask"], None]),) if s.plain.takes == "nested" else x


def _told(out: Any, y: Tensor) -> Tensor:
    logits, value, _ = parts_of(out)
    return F.cross_entropy(logits, y) + F.mse_loss(value, y / 5.0)


def _by_hand(s: Journey, x: dict[str, Any], y: Tensor) -> Tensor:
    s.clear()
    s.looks_on(2)
    logits, value, _ = super(Journey, s).call(s.model, x)
    loss = F.cross_entropy(logits, y) + F.mse_loss(value, y / 5.0)
    loss.backward()
    return loss


def _stepped(s: Journey) -> None:
    """A step, after which an engine forgets gradients."""
    for optimizer in s.optims:
        optimizer.step()
    s.clear()


def _engine_steps(s: Journey, x: dict[str, Any], y: Tensor) -> Tensor:
    """The engine trains, where it can be told how."""
    if s.is_plain or s.plain.takes == "data":
        loss = _by_hand(s, x, y)
        _stepped(s)
    else:
        s.clear()
        s.looks_on(2)
        loss = s.model.engine.train_step((_inputs(s, x), y))
    s.looks_on()
    return loss


def _engine_accumulates(s: Journey, x: dict[str, Any], y: Tensor) -> Tensor:
    """A batch by the engine, and steps of the program; the loss of two batches as one."""
    engine = None if s.is_plain or s.plain.takes == "data" else s.model.engine
    s.model.eval()
    more = [s.batch(970, 6), s.batch(971, 4)]
    if engine is None:
        with torch.no_grad():
            losses = [_told(super(Journey, s).call(s.model, one), due) for one, due in more]
        s.out.append(0.6 * losses[0] + 0.4 * losses[1])
    else:
        s.out.append(engine.evaluate([(_inputs(s, one), due) for one, due in more]))
    s.model.train()
    if engine is None:
        loss = _by_hand(s, x, y)
        s.looks_on()
        _stepped(s)
        return loss
    s.clear()
    s.looks_on(2)
    engine.accumulate((_inputs(s, x), y))
    engine.finish_gradients()
    loss = engine.loss
    s.looks_on()
    engine.step()
    return loss


def _engine_goes_back(s: Journey, x: dict[str, Any], y: Tensor) -> Tensor:
    """``engine.backward``, clipping by hand, and the engine's step."""
    s.clear()
    logits, value, _ = s.call(s.model, x)
    loss = F.cross_entropy(logits, y) + F.mse_loss(value, y / 5.0)
    if s.is_plain:
        loss.backward()
    else:
        s.model.engine.backward(loss)
    s.out.append(nn.utils.clip_grad_norm_(s.model.parameters(), 0.3))
    s.looks_on()
    if s.is_plain:
        _stepped(s)
    else:
        s.model.engine.step()
    return loss


WAYS: dict[str, Callable[[Journey, dict[str, Any], Tensor], Tensor]] = {
    "engine steps": _engine_steps,
    "engine accumulates": _engine_accumulates,
    "engine goes back": _engine_goes_back,
}

# ---- acts


@torch.no_grad()
def _followed(s: Journey) -> None:
    """A copy follows the weights."""
    if "follower" not in s.kept:
        s.kept["follower"] = copy.deepcopy(s.model).requires_grad_(False)
    else:
        follower = s.kept["follower"]
        for a, p in zip(follower.parameters(), s.model.parameters(), strict=True):
            a.lerp_(p, 0.3)
        for a, b in zip(follower.buffers(), s.model.buffers(), strict=True):
            a.copy_(b)
    if s.step % 2:
        s.kept["follower"].eval()
        s.out.append(s.call(s.kept["follower"], s.batch(980, 4)[0])[0])


def _some_frozen(s: Journey) -> None:
    """Some are frozen, others come back."""
    for i, p in enumerate(s.model.parameters()):
        if (i + s.step) % 3 == 0 and p is not s.model.value.weight:
            p.requires_grad_(not p.requires_grad)
            if s.step % 2:
                p.grad = None


def _only_heads(s: Journey) -> None:
    """Heads alone, or all."""
    is_free = s.model.norm.weight.requires_grad
    for name, p in s.model.named_parameters():
        if not name.startswith(("head", "value")):
            p.requires_grad_(not is_free)


def _later_optimizer(s: Journey) -> None:
    """Another optimizer for a part, which leaves those that had it."""
    part = list(s.model.norm.parameters())
    ids = {id(p) for p in part}
    if s.scheduler is not None or s.optimizer.startswith("lbfgs"):
        return
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
        for p in part:
            optimizer.state.pop(p, None)
    s.optims.append(torch.optim.Adam(part, lr=0.003, eps=1e-4))


def _kept_or_loaded(s: Journey) -> None:
    """A checkpoint while training goes on, or back to it."""
    if s.changed or (not s.is_plain and not all(map(s.model.engine.has_optimizer, s.optims))):
        return
    s.clear()
    if "checkpoint" not in s.kept:
        if s.is_plain:
            s.kept["checkpoint"] = _states_of(s), torch.get_rng_state()
        else:
            s.kept["checkpoint"] = f"{s.folder}/kept{s.step}"
            named = {} if s.scheduler is None else {"schedule": s.scheduler}
            s.model.engine.save(s.kept["checkpoint"], asynchronous=s.seed % 3 > 0, **named)
    elif s.is_plain:
        states, drawn = s.kept.pop("checkpoint")
        _put_back(s, states)
        torch.set_rng_state(drawn)
    else:
        named = {} if s.scheduler is None else {"schedule": s.scheduler}
        s.model.engine.load(s.kept.pop("checkpoint"), **named)


ACTS: dict[str, Callable[[Journey], None]] = {
    "freeze some": _some_frozen,
    "only heads": _only_heads,
    "later optimizer": _later_optimizer,
    "checkpoint": _kept_or_loaded,
    "checkpoint 2": _kept_or_loaded,
    **{f"look: {name}": look for name, look in LOOKS.items()},
}

# ---- plans

ON_EIGHT: list[dict[str, Any]] = [
    {"tensor": 8, "tensor_mode": "3d"},
    {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    {"tensor": 4, "tensor_mode": "2d", "data": 2, "zero": 3},
    {"data": 2, "tensor": 2, "pipe": 2, "zero": 1},
]


def plans(seed: int) -> list[list[dict[str, Any]]]:
    """Two plans of the same number of ranks for each leg."""
    journey = Journey(seed)
    lot, net = random.Random(f"plans of journey {seed}"), journey.net()
    routed = any(name.startswith("routed") for name in net.names)
    of_batches = any(name.startswith(of) for name in net.names for of in (*OF_BATCHES, *MORE_OF_BATCHES))
    found = []
    for _ in journey.legs():
        world = 8 if lot.random() < 0.05 else lot.choice([1, 2, 2, 2, 4, 4])
        two = [drawn_mixes.plan_of(lot, world, routed, net.is_long) for _ in range(2)]
        for plan in two:
            if world == 8 and lot.random() < 0.7:
                plan.clear()
                plan |= lot.choice(ON_EIGHT)
            if plan.get("tensor") == 4 and "tensor_mode" not in plan and lot.random() < 0.3:
                plan |= {"tensor_mode": "2.5d", "depth": 2, "sequence_parallel": False}
                plan["async_tensor_parallel"] = False
            is_cut = "pipe" in plan and not of_batches and lot.random() < 0.3
            if journey.way == "micro" or (is_cut and journey.way != "engine goes back"):
                plan["accumulate"] = 2
            if journey.precision not in ("", "autocast", "scaled"):
                plan["precision"] = journey.precision
        found.append(two)
    return found


def is_exact(plan: dict[str, Any]) -> bool:
    """Whether a plan computes as one process does, number by number."""
    return plan.get("accumulate", 1) == 1 and all(
        plan.get(axis, 1) == 1 for axis in ("data", "replicate", "tensor", "context", "expert")
    )
