"""What is drawn of a course (``drawn_courses.py``) beside what scenes have: optimizers, schedules, how
steps are made, of what losses; acts between."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils

from tests.zoo.drawn_acts import _put_back, _states_of
from tests.zoo.drawn_bricks import WIDTH
from tests.zoo.drawn_nets import parts_of

if TYPE_CHECKING:
    from tests.zoo.drawn_courses import Course

Tensor = torch.Tensor
Groups = list[dict[str, Any]]

# ---- optimizers and schedules


class Signed(torch.optim.Optimizer):
    """Lion, as people write it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            one, other = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["step"] = torch.zeros_like(p), 0
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (state["mean"] * one + p.grad * (1 - one)).mul(8).tanh()
                p.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - other)
        return loss


class Slow(torch.optim.Optimizer):
    """Momentum, and slow weights that are gone back to every second step (Lookahead)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state |= {"slow": p.clone(), "step": torch.tensor(0.0)}
                if p.grad is not None:
                    p -= group["lr"] * (p.grad + group["weight_decay"] * p)
                state["step"] += 1
                if state["step"] % 2 == 0:
                    state["slow"] += 0.5 * (p - state["slow"])
                    p.copy_(state["slow"])
        return loss


OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "lbfgs": lambda groups: torch.optim.LBFGS(groups[0]["params"], lr=0.1, max_iter=3, history_size=3),
    "lbfgs wolfe": lambda groups: torch.optim.LBFGS(
        groups[0]["params"], max_iter=2, line_search_fn="strong_wolfe"
    ),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-3),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "fused": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-4, fused=True),
    "fused sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True),
    "foreach rms": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-3, foreach=True),
    "maximize": lambda groups: torch.optim.AdamW(groups, lr=1e-3, eps=1e-4, maximize=True),
    "sparse": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "sparse adagrad": lambda groups: torch.optim.Adagrad(
        groups, 1e-2, eps=1e-3, initial_accumulator_value=0.1
    ),
    "lion": lambda groups: Signed(groups, lr=5e-3),
    "slow": lambda groups: Slow(groups),
}

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.02, total_steps=12, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.03, 2, cycle_momentum="momentum" in o.defaults),
    "plateau by group": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.3, patience=0, cooldown=1, threshold=0.5, min_lr=1e-4
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "swa": lambda o: swa_utils.SWALR(o, 0.005, anneal_epochs=3),
    "several": lambda o: lr_scheduler.LambdaLR(
        o, [lambda n, i=i: 1 / (1 + n + i) for i, _ in enumerate(o.param_groups)]
    ),
}

# ---- how a step is made


def with_gradients(s: Course) -> list[nn.Parameter]:
    return [p for p in s.params() if p.grad is not None]


def after(change: Callable[[Course], Any]) -> Callable[[Course, Any, Tensor], Tensor]:
    """A step whose gradients are changed before it."""

    def way(s: Course, x: Any, y: Tensor) -> Tensor:
        loss = s.went_back(x, y)
        told = change(s)
        if told is not None:
            s.out.append(told)
        s.update()
        return loss

    return way


def _clipped_by_group(s: Course) -> None:
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            s.out.append(nn.utils.clip_grad_norm_(group["params"], 0.2))


@torch.no_grad()
def _adaptive(s: Course) -> None:
    """By norms of rows (AGC)."""
    for p in with_gradients(s):
        dims = tuple(range(1, p.ndim)) if p.ndim > 1 else None
        size = p.norm(dim=dims, keepdim=p.ndim > 1).clamp(min=1e-3)
        norm = p.grad.norm(dim=dims, keepdim=p.ndim > 1)  # type: ignore[union-attr]
        clipped = p.grad * (0.05 * size / norm.clamp(min=1e-6))  # type: ignore[operator]
        p.grad.copy_(torch.where(norm > 0.05 * size, clipped, p.grad))  # type: ignore[union-attr, arg-type]


def _clipped_apart(s: Course) -> Any:
    """By torch's two halves of clipping."""
    params = with_gradients(s)
    norm = nn.utils.get_total_norm([p.grad for p in params])  # type: ignore[misc]
    nn.utils.clip_grads_with_norm_(params, 0.3, norm)
    return norm


@torch.no_grad()
def _grokked(s: Course) -> None:
    """Gradients and their averages (Grokfast)."""
    mean = s.kept.setdefault("mean of gradients", {})
    for i, p in enumerate(s.model.parameters()):
        if p.grad is not None:
            mean[i] = p.grad.clone() if i not in mean else mean[i] * 0.8 + p.grad * 0.2
            p.grad.add_(mean[i], alpha=2.0)


def _quantile(s: Course) -> Any:
    """By what past norms were."""
    norm = torch.stack([p.grad.norm() for p in with_gradients(s)]).norm().item()  # type: ignore[union-attr]
    history = s.kept.setdefault("norms", [])
    history.append(norm)
    bound = sorted(history)[len(history) // 2] * 0.9
    nn.utils.clip_grad_norm_(s.model.parameters(), bound)
    return norm


def _way_closure(s: Course, x: Any, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        loss = s.went_back(x, y)
        s.out.append(loss.detach())
        return loss

    loss: Any = s.optims[0].step(closure)  # type: ignore[arg-type]
    for optimizer in s.optims[1:]:
        optimizer.step()
    return loss


def _way_several(s: Course, x: Any, y: Tensor) -> Tensor:
    """Several losses at once, and one more."""
    s.clear()
    logits, value, hidden = s.call(s.model, x)
    losses = [F.cross_entropy(logits, y), (value - y / 5).abs().mean()]
    torch.autograd.backward(losses, retain_graph=True)
    (0.1 * hidden.square().mean()).backward()
    s.update()
    return losses[0] + losses[1].detach()


def _way_inputs(s: Course, x: Any, y: Tensor) -> Tensor:
    """One loss for the heads, one for the rest."""
    s.clear()
    logits, value, _ = s.call(s.model, x)
    heads = [p for p in (*s.model.head.parameters(), *s.model.value.parameters()) if p.requires_grad]
    ids = {id(p) for p in heads}
    one = F.cross_entropy(logits, y) + value.square().mean()
    other = F.mse_loss(value, y / 5.0) + logits.mean()
    one.backward(inputs=heads, retain_graph=True)
    other.backward(inputs=[p for p in s.params() if id(p) not in ids])
    s.update()
    return one + other.detach()


def _way_micro(s: Course, x: Any, y: Tensor) -> Tensor:
    """Micro-batches of equal sizes, which an engine may count."""
    s.clear()
    total, n = torch.zeros(()), len(y)
    for at in (slice(0, n // 2), slice(n // 2, n)):
        loss = s.loss({k: v[at] for k, v in x.items()}, y[at])
        if s.is_plain:
            (loss / 2).backward()
        else:
            s.model.engine.backward(loss)
        total = total + loss.detach() / 2
    s.update()
    return total


def _way_averaged(s: Course, x: Any, y: Tensor) -> Tensor:
    """An average of weights after each step, evaluated and at last gone on from."""
    if "averaged model" not in s.kept:
        s.kept["averaged model"] = swa_utils.AveragedModel(
            s.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7), use_buffers=s.seed % 2 == 0
        )
    loss = s.went_back(x, y)
    s.update()
    s.kept["averaged model"].update_parameters(s.model)
    if s.step == 4:
        s.model.load_state_dict(s.kept["averaged model"].module.state_dict())
    return loss


def _way_mixed_up(s: Course, x: Any, y: Tensor) -> Tensor:
    """Rows mixed by torch's dice, with labels of both; the program's own noise."""
    order, share = torch.randperm(len(y)), torch.rand(()).item()
    s.clear()
    logits = s.call(s.model, {k: v.roll(random.randrange(2), 0) for k, v in x.items()})[0]
    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])
    loss.backward()
    s.update()
    return loss


def _way_within(s: Course, x: Any, y: Tensor) -> Tensor:
    """Hooks of the optimizer count and norm."""
    seen = s.kept.setdefault("steps", [])
    one = s.optims[0].register_step_pre_hook(
        lambda o, *_: nn.utils.clip_grad_value_([p for g in o.param_groups for p in g["params"]], 0.05)
    )
    other = s.optims[0].register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    loss = s.went_back(x, y)
    s.update()
    one.remove()
    other.remove()
    s.out.append(float(sum(seen)))
    return loss


def _way_bounded(s: Course, x: Any, y: Tensor) -> Tensor:
    """Rows of matrices are kept short after each step."""
    loss = s.went_back(x, y)
    s.update()
    with torch.no_grad():
        for p in s.params():
            if p.ndim == 2:
                p.copy_(torch.renorm(p, 2, 0, 0.9))
    return loss


def _way_checked(s: Course, x: Any, y: Tensor) -> Tensor:
    """A step is left out where a loss is not finite, or not better than ever by far."""
    s.clear()
    loss = s.loss(x, y)
    if not torch.isfinite(loss) or (s.step == 1 and loss.item() < 1e9):
        s.out.append(-1.0)
        return loss
    loss.backward()
    if any(not torch.isfinite(p.grad).all() for p in with_gradients(s)):  # type: ignore[arg-type]
        return loss
    s.update()
    return loss


def _way_zeros(s: Course, x: Any, y: Tensor) -> Tensor:
    """Gradients are made zeros before, not dropped; one call is under no_grad before."""
    with torch.no_grad():
        s.call(s.model, x)
    for optimizer in s.optims:
        optimizer.zero_grad(set_to_none=False)
    loss = s.loss(x, y)
    loss.backward()
    s.update()
    return loss


WAYS: dict[str, Callable[[Course, Any, Tensor], Tensor]] = {
    "closure": _way_closure,
    "values": after(lambda s: nn.utils.clip_grad_value_(s.model.parameters(), 0.02)),
    "norm of groups": after(_clipped_by_group),
    "norm inf": after(lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 0.1, float("inf"))),
    "norm 1": after(lambda s: nn.utils.clip_grad_norm_(s.params(), 1.0, 1.0, foreach=True)),
    "adaptive": after(_adaptive),
    "apart": after(_clipped_apart),
    "grok": after(_grokked),
    "quantile": after(_quantile),
    "several": _way_several,
    "inputs": _way_inputs,
    "micro": _way_micro,
    "averaged": _way_averaged,
    "mixed up": _way_mixed_up,
    "within": _way_within,
    "bounded": _way_bounded,
    "checked": _way_checked,
    "zeros": _way_zeros,
}

# ---- losses


def _aligned(s: Course, x: Any, y: Tensor) -> Tensor:
    """CTC, over three places of which the last rows have fewer."""
    logits = s.call(s.model, x)[0]
    told = (logits[:, None] * torch.tensor([1.0, 0.5, -1.0])[:, None]).log_softmax(-1).transpose(0, 1)
    lengths = torch.where(torch.arange(len(y)) < len(y) // 2, 3, 2)
    loss = F.ctc_loss(told, (y[:, None] % 4) + 1, lengths, torch.ones_like(lengths))
    return loss + logits.square().mean() / 9


def _ragged(s: Course, x: Any, y: Tensor) -> Tensor:
    """Rows of unequal lengths, as targets say."""
    hidden = s.call(s.model, x)[2]
    mask = torch.arange(WIDTH) <= y[:, None]
    far = F.l1_loss(hidden, torch.zeros_like(hidden), reduction="none")
    return (far * mask).sum() / mask.sum() + s.model.head(hidden).logsumexp(-1).mean()


def _ignored(s: Course, x: Any, y: Tensor) -> Tensor:
    logits, value, _ = s.call(s.model, x)
    due = torch.where(y == 0, -100, y)
    weight = torch.linspace(0.5, 1.5, logits.shape[-1])
    loss = F.cross_entropy(logits, due, weight, label_smoothing=0.1, ignore_index=-100)
    return loss.nan_to_num() + value.exp().mean()


def _gaussian(s: Course, x: Any, y: Tensor) -> Tensor:
    logits, value, _ = s.call(s.model, x)
    return F.gaussian_nll_loss(value, y / 5.0, F.softplus(logits[:, 0]) + 0.1) + F.poisson_nll_loss(
        logits[:, 1], y.double()
    )


def _margins(s: Course, x: Any, y: Tensor) -> Tensor:
    logits, _, hidden = s.call(s.model, x)
    sides = torch.where(torch.arange(len(y)) % 2 == 0, 1.0, -1.0)
    return (
        F.multi_margin_loss(logits, y)
        + F.cosine_embedding_loss(hidden, hidden.detach().flip(0) + 0.3, sides)
        + F.margin_ranking_loss(logits[:, 0], logits[:, 1], sides, margin=0.2)
    )


def _adapted(s: Course, x: Any, y: Tensor) -> Tensor:
    """A softmax of two levels, beside the model, not trained."""
    if "adaptive" not in s.kept:
        torch.manual_seed(5)
        s.kept["adaptive"] = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 6, [2, 4]).double().requires_grad_(False)
    logits, _, hidden = s.call(s.model, x)
    return s.kept["adaptive"](hidden, y).loss + logits.square().mean()  # type: ignore[no-any-return]


def _penalized(s: Course, x: Any, y: Tensor) -> Tensor:
    """Norms and products of parameters."""
    logits, value, _ = s.call(s.model, x)
    loss = F.cross_entropy(logits, y) + value.square().mean()
    for p in s.params():
        if p.ndim == 2:
            loss = loss + 1e-3 * (p.abs().sum() + (p @ p.t() - torch.eye(len(p))).square().mean())
    return loss


def _compiled(s: Course, x: Any, y: Tensor) -> Tensor:
    """A compiled function of the model's outputs."""
    if "loss" not in s.kept:
        s.kept["loss"] = torch.compile(
            lambda logits, value, y: F.cross_entropy(logits, y) + (value - y / 5).square().mean(),
            backend="eager",
        )
    logits, value, _ = s.call(s.model, x)
    return s.kept["loss"](logits, value, y)  # type: ignore[no-any-return]


def _dropped(s: Course, x: Any, y: Tensor) -> Tensor:
    """Some rows are left out, as a count of steps says; the mean is of the rest."""
    keep = (torch.arange(len(y)) + s.step) % 3 > 0
    logits = s.call(s.model, x)[0]
    return F.cross_entropy(logits[keep], y[keep])


LOSSES: dict[str, Callable[[Course, Any, Tensor], Tensor]] = {
    "ctc": _aligned,
    "ragged": _ragged,
    "ignored": _ignored,
    "gaussian": _gaussian,
    "margins": _margins,
    "adaptive": _adapted,
    "penalized": _penalized,
    "compiled": _compiled,
    "dropped": _dropped,
}

# ---- what is done between steps


def _outputs(s: Course, mode: Any, number: int, rows: int) -> None:
    """All that the model gives for a batch it has not seen."""
    s.model.eval()
    with mode():
        s.out += [x.clone() for x in s.call(s.model, s.batch(number, rows)[0])]
    s.model.train()


def _thawed(s: Course) -> None:
    """All but the heads is frozen; then a part after the other is trained again, in a group of its own."""
    heads = {id(p) for p in (*s.model.head.parameters(), *s.model.value.parameters())}
    parts: Iterable[nn.Module] = [s.model.norm, *reversed(list(s.model.blocks)), s.model.stem]
    if "frozen" not in s.kept:
        s.kept["frozen"] = True
        for p in s.model.parameters():
            if id(p) not in heads:
                p.requires_grad_(False)
                p.grad = None
        return
    for part in parts:
        mine = [p for p in part.parameters() if not p.requires_grad]
        if mine:
            for p in mine:
                p.requires_grad_(True)
            return


def _group_added(s: Course) -> None:
    """A part leaves its groups, and comes back in one of its own."""
    if s.scheduler is not None:
        return
    part = list(s.model.norm.parameters())
    ids = {id(p) for p in part}
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in ids]
    for p in part:
        for optimizer in s.optims:
            optimizer.state.pop(p, None)
    s.optims[-1].add_param_group({"params": part, "lr": 0.003})


def _best(s: Course) -> None:
    """The best weights are kept, and put back where nothing has become better."""
    s.model.eval()
    with torch.no_grad():
        x, y = s.batch(920)
        loss = F.cross_entropy(s.call(s.model, x)[0], y).item()
    s.model.train()
    s.out.append(loss)
    if loss < s.kept.get("best", float("inf")):
        s.kept |= {"best": loss, "best weights": copy.deepcopy(s.model.state_dict())}
    else:
        s.model.load_state_dict(s.kept["best weights"])


def _rolled_back(s: Course) -> None:
    """Everything is kept, or as it was when it was kept."""
    if "all" in s.kept:
        _put_back(s, s.kept.pop("all"))
    else:
        s.kept["all"] = _states_of(s)


def _filed(s: Course) -> None:
    """All states through a file; then on, with optimizers made anew."""
    file = io.BytesIO()
    torch.save(_states_of(s), file)
    file.seek(0)
    if s.changed or s.judge is not None:
        return
    s.optims = s.optimizers_of(s.model)
    s.scheduler = s.schedules[s.schedule](s.optims[0])
    _put_back(s, torch.load(file, weights_only=False))


def _decoded(s: Course) -> None:
    """Words one by one, with caches where the model has them."""
    if s.plain.kind != "ids":
        return
    ids = s.batch(921, 4)[0]["x"][:, :2]
    s.model.eval()
    with torch.no_grad():
        if hasattr(s.plain, "lines"):
            for block in s.model.blocks:
                block.forget()
            past = None
            for _ in range(3):
                past = past if s.plain.how == "given" else None
                logits, _, last, past = s.model(ids, None, past, keep=True)
                ids = logits.argmax(-1)[:, None]
                s.out += [last, ids]
            for block in s.model.blocks:
                block.forget()
        else:
            for _ in range(2):
                given = {"x": ids, "mask": torch.ones(ids.shape, dtype=torch.bool)}
                ids = torch.cat([ids, s.call(s.model, given)[0].argmax(-1)[:, None]], 1)
            s.out.append(ids)
    s.model.train()


def _drawn(s: Course) -> None:
    """The program's own numbers, and parameters that are made of such."""
    s.out += [torch.rand(3), random.random()]
    with torch.no_grad():
        s.model.norm.bias.copy_(torch.randn(WIDTH) * 0.05)


def _reset(s: Course) -> None:
    """A head begins anew, as one that was made beside, and its states are forgotten."""
    head = s.model.head
    if parametrize.is_parametrized(head) or head.weight is getattr(s.model.stem, "weight", None):
        return
    head.load_state_dict(nn.Linear(WIDTH, len(head.weight)).double().state_dict())
    for optimizer in s.optims:
        for p in head.parameters():
            optimizer.state.pop(p, None)


@torch.no_grad()
def _shrunk(s: Course) -> None:
    """Shrink and perturb."""
    generator = torch.Generator().manual_seed(3)
    for p in s.model.parameters():
        p.mul_(0.9).add_(torch.randn(p.shape, generator=generator, dtype=torch.float64), alpha=0.01)


def _plain_again(s: Course) -> None:
    """A parametrization that came goes."""
    head = s.model.value
    if not parametrize.is_parametrized(head):
        return
    parametrize.remove_parametrizations(head, "weight")
    s.optims = s.optimizers_of(s.model)
    s.scheduler = s.schedules[s.schedule](s.optims[0])
    s.kept.clear()
    s.changed = True


def _normed(s: Course) -> None:
    """A norm of a weight comes."""
    head = s.model.head
    if parametrize.is_parametrized(head) or head.weight is getattr(s.model.stem, "weight", None):
        return
    parametrizations.weight_norm(head, dim=1)
    s.optims = s.optimizers_of(s.model)
    s.scheduler = s.schedules[s.schedule](s.optims[0])
    s.kept.clear()
    s.changed = True


class Adapted(nn.Module):
    """A linear layer, and a product of two small ones beside it (LoRA)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.full((2, WIDTH), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()  # type: ignore[no-any-return]


def _lora(s: Course) -> None:
    """A head has an adapter, or none any more; others are frozen meanwhile."""
    if isinstance(s.model.value, Adapted):
        adapted = s.model.value
        with torch.no_grad():
            adapted.inner.weight += adapted.up @ adapted.down
        s.model.value = adapted.inner
    elif type(s.model.value) is nn.Linear and not parametrize.is_parametrized(s.model.value):
        s.model.value = Adapted(s.model.value)
    else:
        return
    is_adapted = isinstance(s.model.value, Adapted)
    for name, p in s.model.named_parameters():
        p.requires_grad_(not is_adapted or "inner" not in name)
    s.clear()
    s.optims = s.optimizers_of(s.model)
    s.scheduler = s.schedules[s.schedule](s.optims[0])
    s.kept.clear()
    s.changed = True


def _swa_with_norms(s: Course) -> None:
    """An average whose norms see batches once more, and the model goes on from it."""
    mean = swa_utils.AveragedModel(s.model)
    mean.update_parameters(s.model)
    if s.plain.takes == "plain" and s.plain.kind in ("rows", "image"):
        swa_utils.update_bn([s.batch(n)[0]["x"] for n in (930, 931)], mean)
    s.model.load_state_dict(mean.module.state_dict())
    with torch.no_grad():
        s.out.append(s.call(mean, s.batch(932)[0])[0])


def _states_scaled(s: Course) -> None:
    for optimizer in s.optims:
        for state in optimizer.state.values():
            for name, x in state.items():
                if isinstance(x, Tensor) and x.ndim and x.is_floating_point() and "sq" not in name:
                    x.mul_(0.5)


def _betas(s: Course) -> None:
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (0.8, group["betas"][1])
            group["weight_decay"] = 0.01 + group.get("weight_decay", 0.0)


def _rows_masked(s: Course) -> None:
    """A hook lets no gradient to a row."""
    weight = s.model.head.weight
    if "mask" in s.kept:
        s.kept.pop("mask").remove()
    elif weight.requires_grad and not parametrize.is_parametrized(s.model.head):
        mask = torch.ones(len(weight), 1, dtype=torch.float64)
        mask[1] = 0
        s.kept["mask"] = weight.register_hook(lambda grad: grad * mask)


def _stem_called(s: Course) -> None:
    """Parts are called by themselves."""
    with torch.no_grad():
        h = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)
        s.out += [s.model.head(s.model.norm(h)), s.model.value(h)]


def _saliency(s: Course) -> None:
    """Gradients of inputs."""
    x, _ = s.batch(940, 4)
    if not x["x"].is_floating_point():
        return
    at = x["x"].clone().requires_grad_()
    s.model.eval()
    logits = s.call(s.model, {**x, "x": at})[0]
    s.out.append(torch.autograd.grad(logits.max(-1).values.sum(), at)[0])
    s.model.train()


def _jacobian(s: Course) -> None:
    """Of the outputs by an input, through torch.func."""
    x, _ = s.batch(941, 2)
    if not x["x"].is_floating_point():
        return
    s.model.eval()

    def value(at: Tensor) -> Tensor:
        return s.call(s.model, {**x, "x": at})[1].sum()

    s.out.append(torch.autograd.functional.jacobian(value, x["x"]))
    s.model.train()


def _fresh_copy(s: Course) -> None:
    """A plain model is given the weights."""
    if s.changed:
        return
    twin = s.net()
    twin.load_state_dict({name: torch.as_tensor(v) for name, v in s.model.state_dict().items()})
    with torch.no_grad():
        s.out.append(parts_of(s.call(twin.eval(), s.batch(942)[0]))[0])


def _counted(s: Course) -> None:
    s.out += [
        sum(p.numel() for p in s.params()),
        float(sum((p == 0).sum() for p in s.model.parameters())),
        max(p.abs().max().item() for p in s.model.parameters()),
        float(len(list(s.model.buffers()))),
    ]


def _histogram(s: Course) -> None:
    for p in s.params():
        if p.grad is not None:
            s.out += [p.grad.std(correction=0), torch.quantile(p.detach().flatten(), 0.3), (p * p.grad).sum()]


ACTS: dict[str, Callable[[Course], None]] = {
    "outputs": lambda s: _outputs(s, torch.no_grad, 950, 8),
    "outputs 5": lambda s: _outputs(s, torch.inference_mode, 951, 5),
    "outputs 1": lambda s: _outputs(s, torch.inference_mode, 952, 1),
    "thaw": _thawed,
    "thaw 2": _thawed,
    "add group": _group_added,
    "best": _best,
    "best 2": _best,
    "roll back": _rolled_back,
    "roll back 2": _rolled_back,
    "file": _filed,
    "decode": _decoded,
    "draw": _drawn,
    "reset": _reset,
    "shrink": _shrunk,
    "plain again": _plain_again,
    "norm of weight": _normed,
    "lora": _lora,
    "swa and norms": _swa_with_norms,
    "scale states": _states_scaled,
    "betas": _betas,
    "mask rows": _rows_masked,
    "parts": _stem_called,
    "saliency": _saliency,
    "jacobian": _jacobian,
    "fresh copy": _fresh_copy,
    "count": _counted,
    "histogram": _histogram,
}
