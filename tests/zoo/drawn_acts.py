"""What is drawn of a scene (``drawn_scenes.py``): how steps are made, of what losses; acts between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.zoo.drawn_bricks import WIDTH
from tests.zoo.drawn_nets import CLASSES, parts_of

if TYPE_CHECKING:
    from tests.zoo.drawn_scenes import Scene

Tensor = torch.Tensor

MORE_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
        ],
        [2],
    ),
    "polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 6),
    "multiplied": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
}

# ---- how a step is made


def _way_plain(s: Scene, x: Any, y: Tensor) -> Tensor:
    loss = s.went_back(x, y)
    s.update()
    return loss


def _way_clipped(s: Scene, x: Any, y: Tensor) -> Tensor:
    loss = s.went_back(x, y)
    s.out.append(nn.utils.clip_grad_norm_(s.model.parameters(), 0.3))
    s.update()
    return loss


def _way_each_clipped(s: Scene, x: Any, y: Tensor) -> Tensor:
    loss = s.went_back(x, y)
    for p in s.params():
        if p.grad is not None:
            nn.utils.clip_grad_norm_(p, 0.1)
    s.update()
    return loss


def _way_summed(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Micro-batches by hand, of unequal sizes."""
    s.clear()
    total, n = torch.zeros(()), len(y)
    for at in (slice(0, n // 2 + 1), slice(n // 2 + 1, n)):
        loss = s.loss({k: v[at] for k, v in x.items()}, y[at]) * (len(y[at]) / n)
        loss.backward()
        total = total + loss.detach()
    s.update()
    return total


def _way_scaled(s: Scene, x: Any, y: Tensor) -> Tensor:
    """By a GradScaler, of which one step is left out."""
    scaler = s.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
    s.clear()
    loss = s.loss(x, y)
    scaler.scale(loss).backward()
    if s.step == 2:
        s.model.norm.bias.grad.fill_(float("inf"))
    for optimizer in s.optims:
        scaler.unscale_(optimizer)
    if s.step != 2:
        s.out.append(nn.utils.clip_grad_norm_(s.model.parameters(), 0.5))
    for optimizer in s.optims:
        scaler.step(optimizer)
    scaler.update()
    s.out.append(scaler.get_scale())
    return loss


def _way_in_turn(s: Scene, x: Any, y: Tensor) -> Tensor:
    """The last optimizer steps every second time, of gradients of both."""
    s.optims[0].zero_grad()
    loss = s.loss(x, y)
    loss.backward()
    s.optims[0].step()
    if s.step % 2 and len(s.optims) > 1:
        s.optims[1].step()
        s.optims[1].zero_grad()
    return loss


def _way_sharp(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Sharpness-aware minimization by hand."""
    loss = s.went_back(x, y)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in s.params() if p.grad is not None]).norm()
        moved = [(p, p.grad * (0.05 / (norm + 1e-12))) for p in s.params() if p.grad is not None]
        for p, e in moved:
            p.add_(e)
    s.clear()
    s.loss(x, y).backward()
    with torch.no_grad():
        for p, e in moved:
            p.sub_(e)
    s.update()
    return loss


def _way_surgery(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Gradients of two losses, of which one is projected (PCGrad)."""
    s.clear()
    logits, value, _ = s.call(s.model, x)
    one, other = F.cross_entropy(logits, y), (value - y / 3).square().mean()
    ps = s.params()
    a = torch.autograd.grad(one, ps, retain_graph=True, allow_unused=True)
    b = torch.autograd.grad(other, ps, allow_unused=True)
    both = [(u, v) for u, v in zip(a, b, strict=True) if u is not None and v is not None]
    dot = sum((u * v).sum() for u, v in both) if both else torch.zeros(())
    share = dot / (sum((v * v).sum() for _, v in both) + 1e-12) if both else dot
    for p, u, v in zip(ps, a, b, strict=True):
        if u is None:
            p.grad = None if v is None else v.clone()
        else:
            p.grad = u.clone() if v is None else u - share * v + v
    s.out.append(dot)
    s.update()
    return one + other


def _way_older(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Two calls, which go back in another order, with a step of gradients of both."""
    s.clear()
    one = s.loss(x, y)
    other = s.loss({k: v.flip(0) for k, v in x.items()}, y.flip(0)) * 0.3
    other.backward()
    one.backward()
    s.update()
    return one


def _way_noisy(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Noise is added to gradients, of a generator of its own."""
    loss = s.went_back(x, y)
    generator = torch.Generator().manual_seed(s.step)
    for p in s.params():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.grad is not None:
            p.grad.add_(noise, alpha=0.01)
    s.update()
    return loss


def _way_vector(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Gradients as one vector, and back."""
    loss = s.went_back(x, y)
    ps = [p for p in s.params() if p.grad is not None]
    vector = torch.cat([p.grad.flatten() for p in ps])
    vector = vector / (1 + vector.abs().max())
    at = 0
    for p in ps:
        p.grad = vector[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    s.update()
    return loss


WAYS: dict[str, Callable[[Scene, Any, Tensor], Tensor]] = {
    "plain": _way_plain,
    "plain 2": _way_plain,
    "clipped": _way_clipped,
    "each clipped": _way_each_clipped,
    "summed": _way_summed,
    "scaled": _way_scaled,
    "in turn": _way_in_turn,
    "sharp": _way_sharp,
    "surgery": _way_surgery,
    "older": _way_older,
    "noisy": _way_noisy,
    "vector": _way_vector,
}

# ---- losses, which do not go back themselves


def _both(s: Scene, x: Any, y: Tensor) -> Tensor:
    logits, value, hidden = s.call(s.model, x)
    return F.cross_entropy(logits, y) + F.mse_loss(value, y / 5.0) + 0.01 * hidden.square().mean()


def _one_head(s: Scene, x: Any, y: Tensor) -> Tensor:
    """One head gets nothing in every second step."""
    logits, value, _ = s.call(s.model, x)
    return F.cross_entropy(logits, y) if s.step % 2 else F.huber_loss(value, y / 5.0, delta=0.3)


def _judged(s: Scene, x: Any, y: Tensor) -> Tensor:
    logits, value, hidden = s.call(s.model, x)
    assert s.judge is not None
    return s.judge(F.cross_entropy(logits, y), F.mse_loss(value, y / 5.0), hidden, y)  # type: ignore[no-any-return]


def _hardest(s: Scene, x: Any, y: Tensor) -> Tensor:
    losses = F.cross_entropy(s.call(s.model, x)[0], y, reduction="none")
    return losses.topk(max(1, len(y) // 2)).values.mean() + losses[losses > losses.mean()].mean()


def _mixed(s: Scene, x: Any, y: Tensor) -> Tensor:
    logits = s.call(s.model, x)[0]
    order = torch.arange(len(y)).flip(0)
    return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


def _many_labels(s: Scene, x: Any, y: Tensor) -> Tensor:
    due = F.one_hot(y, CLASSES).double()
    return F.binary_cross_entropy_with_logits(
        s.call(s.model, x)[0], due, pos_weight=torch.linspace(1, 2, CLASSES, dtype=torch.float64)
    )


def _dice(s: Scene, x: Any, y: Tensor) -> Tensor:
    p, due = s.call(s.model, x)[0].softmax(-1), F.one_hot(y, CLASSES).double()
    return 1 - (2 * (p * due).sum(0) / (p.sum(0) + due.sum(0) + 1)).mean()


def _triplets(s: Scene, x: Any, y: Tensor) -> Tensor:
    hidden = s.call(s.model, x)[2]
    n = len(hidden) // 2
    loss = nn.TripletMarginLoss(margin=0.7)(hidden[:n], hidden[n : 2 * n], hidden.roll(1, 0)[:n])
    return loss + 0.1 * s.model.head(hidden).logsumexp(-1).mean()


def _contrast(s: Scene, x: Any, y: Tensor) -> Tensor:
    z = F.normalize(s.call(s.model, x)[2], dim=-1)
    same = (y[:, None] == y[None]).double().fill_diagonal_(0)
    logp = (z @ z.t() / 0.5).fill_diagonal_(-1e9).log_softmax(-1)
    return -(logp * same).sum() / (same.sum() + 1) + z.mean()


def _covariance(s: Scene, x: Any, y: Tensor) -> Tensor:
    """VICReg's."""
    h = s.call(s.model, x)[2]
    h = h - h.mean(0)
    covariance = h.t() @ h / max(1, len(h) - 1)
    off = covariance - torch.diag(covariance.diag())
    return F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean() + 0.04 * off.square().sum() + _both(s, x, y)


def _of_target(s: Scene, x: Any, y: Tensor) -> Tensor:
    """A target that is a copy of the prepared model, and follows it slowly."""
    if "target" not in s.kept:
        s.kept["target"] = copy.deepcopy(s.model).requires_grad_(False)
    target = s.kept["target"]
    with torch.no_grad():
        due = s.call(target, x)
        for t, p in zip(target.parameters(), s.model.parameters(), strict=True):
            t.lerp_(p, 0.1)
    out = s.call(s.model, x)
    best = due[0].max(-1).values
    chosen = out[0].gather(1, y[:, None]).squeeze(1)
    return (
        F.smooth_l1_loss(chosen, 0.5 + 0.9 * best)
        + F.mse_loss(out[1], due[1] + 1)
        + 0.1 * _of_entropy(out[0])
    )


def _of_entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits).entropy().mean()


def _policy(s: Scene, x: Any, y: Tensor) -> Tensor:
    """PPO's, with advantages that are normalized over the batch."""
    logits, value, _ = s.call(s.model, x)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=s.call(s.early, x)[0]).log_prob(y)
    gain = y.double() - value.detach()
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    ratio = (torch.distributions.Categorical(logits=logits).log_prob(y) - old).exp()
    loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return loss + 0.5 * (value - y).square().mean() - 0.01 * _of_entropy(logits)


def _dropped_twice(s: Scene, x: Any, y: Tensor) -> Tensor:
    """Two calls of other inputs that are drawn near each other (R-Drop)."""
    a = s.call(s.model, x)[0]
    b = s.call(s.model, {k: v.roll(1, 0) for k, v in x.items()})[0].roll(-1, 0)
    near = F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")
    return 0.5 * (F.cross_entropy(a, y) + F.cross_entropy(b, y)) + near


def _consolidated(s: Scene, x: Any, y: Tensor) -> Tensor:
    """A penalty on what parameters have moved since (EWC)."""
    loss = _both(s, x, y)
    if "was" in s.kept:
        for name, p in s.model.named_parameters():
            if name in s.kept["was"] and p.shape == s.kept["was"][name].shape:
                loss = loss + (s.kept["fisher"][name] * (p - s.kept["was"][name]).square()).sum()
    return loss


LOSSES: dict[str, Callable[[Scene, Any, Tensor], Tensor]] = {
    "both": _both,
    "one head": _one_head,
    "judged": _judged,
    "hardest": _hardest,
    "mixed": _mixed,
    "labels": _many_labels,
    "dice": _dice,
    "triplets": _triplets,
    "contrast": _contrast,
    "covariance": _covariance,
    "target": _of_target,
    "policy": _policy,
    "twice": _dropped_twice,
    "consolidated": _consolidated,
}

# ---- what is done between steps


def _swapped(s: Scene) -> None:
    """Averages of weights are put in for an evaluation, and taken out."""
    mean = s.kept.setdefault("ema", {n: p.detach().clone() for n, p in s.model.named_parameters()})
    named = dict(s.model.named_parameters())
    with torch.no_grad():
        if set(mean) != set(named):
            return
        for n, p in named.items():
            mean[n].mul_(0.8).add_(p.detach(), alpha=0.2)
        held = {n: p.detach().clone() for n, p in named.items()}
        for n, p in named.items():
            p.copy_(mean[n])
        s.model.eval()
        s.out.append(s.call(s.model, s.batch(900, 6)[0])[0].sum().item())
        s.model.train()
        for n, p in named.items():
            p.copy_(held[n])


def _averaged_by_torch(s: Scene) -> None:
    """torch's own averages."""
    if "swa" not in s.kept:
        s.kept["swa"] = torch.optim.swa_utils.AveragedModel(
            s.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
        )
    s.kept["swa"].update_parameters(s.model)
    s.kept["swa"].eval()
    with torch.no_grad():
        s.out.append(s.call(s.kept["swa"], s.batch(901)[0])[1].sum().item())


def _evaluated(s: Scene, rows: int) -> None:
    """Outputs of several batches, put together."""
    s.model.eval()
    found, due = [], []
    with torch.inference_mode():
        for number, n in ((902, rows), (903, 1), (904, 3)):
            x, y = s.batch(number, n)
            found.append(s.call(s.model, x)[0])
            due.append(y)
    s.model.train()
    logits, y = torch.cat(found), torch.cat(due)
    s.out += [F.cross_entropy(logits, y).item(), (logits.argmax(-1) == y).double().mean().item()]
    table = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for i, j in zip(y.tolist(), logits.argmax(-1).tolist(), strict=True):
        table[i, j] += 1
    s.out.append(table)


def _fisher(s: Scene) -> None:
    """Squares of gradients, and where parameters are."""
    fisher: dict[str, Any] = {n: torch.zeros_like(p) for n, p in s.model.named_parameters()}
    for number in (905, 906):
        s.clear()
        x, y = s.batch(number, 4)
        F.cross_entropy(s.call(s.model, x)[0], y).backward()
        for n, p in s.model.named_parameters():
            if p.grad is not None:
                fisher[n] += p.grad.detach() ** 2 / 2
    s.clear()
    s.kept |= {"fisher": fisher, "was": {n: p.detach().clone() for n, p in s.model.named_parameters()}}
    s.out.append(sum(f.sum() for f in fisher.values()))


def _soft(s: Scene) -> None:
    """A proximal step."""
    with torch.no_grad():
        for p in s.params():
            if p.ndim > 1:
                p.copy_(p.sign() * (p.abs() - 0.003).clamp(min=0))


def _pruned(s: Scene) -> None:
    head = s.model.value
    if prune.is_pruned(head):
        prune.remove(head, "weight")
        return
    if not nn.utils.parametrize.is_parametrized(head):
        prune.l1_unstructured(head, "weight", amount=3)
        s.changed = True
        s.kept.clear()


def _new_head(s: Scene) -> None:
    """Another head in the first one's place, which an optimizer is given."""
    old = s.model.value
    s.clear()
    new = nn.Linear(WIDTH, 1).double()
    with torch.no_grad():
        for p in new.parameters():
            p.fill_(0.05)
    s.model.value = new
    gone = {id(p) for p in old.parameters()}
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            if any(id(p) in gone for p in group["params"]):
                group["params"] = [p for p in group["params"] if id(p) not in gone]
        for p in old.parameters():
            optimizer.state.pop(p, None)
    s.optims[-1].param_groups[0]["params"].extend(new.parameters())
    s.kept.clear()
    s.changed = True


def _new_optimizers(s: Scene) -> None:
    """Optimizers made anew of the prepared model's parameters."""
    s.optims = s.optimizers_of(s.model)
    if s.judge is not None:
        s.optims[0].add_param_group({"params": list(s.judge.parameters()), "lr": 0.01})
    s.scheduler = s.schedules[s.schedule](s.optims[0])


def _states_of(s: Scene) -> Any:
    schedule = None if s.scheduler is None else s.scheduler.state_dict()
    return copy.deepcopy((s.model.state_dict(), [o.state_dict() for o in s.optims], schedule))


def _put_back(s: Scene, states: Any) -> None:
    s.model.load_state_dict(states[0])
    for optimizer, state in zip(s.optims, states[1], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))
    if s.scheduler is not None:
        s.scheduler.load_state_dict(copy.deepcopy(states[2]))


def _anew(s: Scene) -> None:
    """A new model, under the other plan; random numbers go on."""
    state = torch.get_rng_state()
    s.plain = s.net()
    s.lays = s.lays[1:] + s.lays[:1]
    s.begin(s.lays[0], s.plain)
    torch.set_rng_state(state)


def _moved(s: Scene) -> None:
    """A new model and optimizers, under another plan, go on from the first one's states."""
    if s.changed:
        return
    states = _states_of(s)
    judge = None if s.judge is None else copy.deepcopy(s.judge.state_dict())
    _anew(s)
    _put_back(s, states)
    if judge is not None:
        s.judge.load_state_dict(judge)  # type: ignore[union-attr]
    s.kept.clear()


def _moved_by_engine(s: Scene) -> None:
    """The same by checkpoints."""
    # optimizers that the engine was not told of are in no checkpoint
    if s.is_plain or s.changed or not all(map(s.model.engine.has_optimizer, s.optims)):
        _moved(s)
        return
    s.clear()
    schedule = None if s.scheduler is None else copy.deepcopy(s.scheduler.state_dict())
    judge = None if s.judge is None else copy.deepcopy(s.judge.state_dict())
    s.model.engine.save(f"{s.folder}/moved{s.step}")
    _anew(s)
    s.model.engine.load(f"{s.folder}/moved{s.step}")
    if s.scheduler is not None:
        s.scheduler.load_state_dict(schedule)
    if judge is not None:
        s.judge.load_state_dict(judge)  # type: ignore[union-attr]
    s.kept.clear()


def _functional(s: Scene) -> None:
    """The model called with other parameters."""
    given = {n: p.detach() * 0.9 for n, p in s.model.named_parameters()}
    x, mask = s.batch(907)[0].values()
    if s.plain.takes == "plain":
        with torch.no_grad():
            s.out.append(parts_of(torch.func.functional_call(s.model, given, (x, mask)))[1].sum())


def _curved(s: Scene) -> None:
    """A product with the Hessian of the heads."""
    x, y = s.batch(908, 4)
    loss = F.cross_entropy(s.call(s.model, x)[0], y)
    if not s.model.norm.weight.requires_grad:
        return
    (g,) = torch.autograd.grad(loss, s.model.norm.weight, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), s.model.norm.weight)
    s.out.append(h)


def _frozen_stem(s: Scene) -> None:
    for part in (s.model.stem, s.model.blocks[0]):
        for p in part.parameters():
            p.requires_grad_(not p.requires_grad)


def _quiet(s: Scene) -> None:
    """Trained in the mode of evaluation, or not any more."""
    s.model.train(not s.model.training)


def _parametrized(s: Scene) -> None:
    """A norm of a head's weight comes, or goes."""
    head = s.model.value
    if prune.is_pruned(head):
        return
    if nn.utils.parametrize.is_parametrized(head):
        return
    old = head.weight
    parametrizations.weight_norm(head)
    new = [head.parametrizations.weight.original0, head.parametrizations.weight.original1]
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            if any(p is old for p in group["params"]) and not any(
                p is q for q in new for p in group["params"]
            ):
                group["params"] = [p for p in group["params"] if p is not old] + new
                optimizer.state.pop(old, None)
    s.kept.clear()
    s.changed = True


def _stepped_without(s: Scene) -> None:
    """A step without gradients."""
    s.clear()
    s.update()


def _copied_and_trained(s: Scene) -> None:
    """A copy of the prepared model, trained on its own for a step."""
    if prune.is_pruned(s.model.value):
        return
    twin = copy.deepcopy(s.model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, y = s.batch(909)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(s.call(twin, x)[0], y).backward()
        optimizer.step()
    s.out.append(sum(p.sum() for p in twin.parameters()))


def _row_by_row(s: Scene) -> None:
    """Norms of each row's gradient."""
    x, y = s.batch(910, 3)
    s.clear()
    s.model.eval()
    for i in range(3):
        s.clear()
        F.cross_entropy(s.call(s.model, {k: v[i : i + 1] for k, v in x.items()})[0], y[i : i + 1]).backward()
        s.out.append(sum(p.grad.norm() for p in s.params() if p.grad is not None))
    s.clear()
    s.model.train()


def _statistics(s: Scene) -> None:
    """Of hooks that look."""
    seen: list[Tensor] = []
    hook = s.model.norm.register_forward_hook(lambda m, given, out: seen.append(out.detach().abs().mean()))
    with torch.no_grad():
        s.call(s.model, s.batch(911, 5)[0])
    hook.remove()
    s.out += seen


def _halved(s: Scene) -> None:
    for optimizer in s.optims:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5


def _momenta_forgotten(s: Scene) -> None:
    for optimizer in s.optims:
        optimizer.state.clear()


def _buffers(s: Scene) -> None:
    s.model.seen.fill_(3)
    s.out += [b.double().sum() for b in s.model.buffers()]


ACTS: dict[str, Callable[[Scene], None]] = {
    "swap": _swapped,
    "swa": _averaged_by_torch,
    "evaluate": lambda s: _evaluated(s, 8),
    "evaluate 7": lambda s: _evaluated(s, 7),
    "fisher": _fisher,
    "soft": _soft,
    "prune": _pruned,
    "new head": _new_head,
    "new optimizers": _new_optimizers,
    "move": _moved,
    "move 2": _moved,
    "move by engine": _moved_by_engine,
    "functional": _functional,
    "curve": _curved,
    "freeze stem": _frozen_stem,
    "quiet": _quiet,
    "parametrize": _parametrized,
    "without": _stepped_without,
    "twin": _copied_and_trained,
    "row by row": _row_by_row,
    "statistics": _statistics,
    "halve": _halved,
    "forget": _momenta_forgotten,
    "buffers": _buffers,
}
