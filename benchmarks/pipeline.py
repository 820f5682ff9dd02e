"""Pipelines beside torch.distributed.pipelining: GPipe, 1F1B and interleaved 1F1B on 2 and 4 gloo ranks.

A plain GPT (4 layers of width 128, 128 tokens, vocabulary 2,048), a batch of 8 rows in 4 or 8
micro-batches, float32, ``torch.optim.AdamW`` as it is by default, one thread a rank. Interleaved 1F1B on 4
ranks has 8 stages, and for it the GPT has 8 layers. All do the same schedule (two stages a rank when
interleaved), and take turns step by step in the same processes on the same batches; the losses of all steps
are compared with those of one process that has the whole batch. By hand stages begin at every so many blocks;
Espalier, left to itself, finds its own cuts.

* *single*: that process.
* *hand*: the schedule's rows in a plain loop over plain modules, with isend and irecv: about what there is to
  reach with those cuts.
* *torch*: ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``.
* *espalier*: ``espalier.initialize(model, optimizer, {"pipe": n, "schedule": ..., "accumulate": m})``, which
  counts what the head and the loss take, and cuts within blocks where that evens it out.
* *same cuts*: that, with ``cuts`` where the others have them.

A timing begins when all ranks are ready and is that of the slowest. Ratios are medians over the rounds of
ratios within a round. The bars of time are those of *espalier*. *Held* is what a step has made and still
holds, gradients apart, after the forward pass of a micro-batch, at its most; as a part of what the schedule
promises: its live micro-batches, each as large as what the graph of the stage's forward pass alone keeps, on
the rank where this part is largest. Buffers of messages on the way are among what is held, and not
promised.

    python benchmarks/pipeline.py [--world 2] [--micro 4] [--only 1f1b] [--rounds 30]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _common import Contender, Section, duration, in_turns, ratio_of, slowest_rank
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import espalier
from espalier.models import GPT2, GPT2Config
from espalier.models.config import token_loss
from espalier.parallel.pipeline import Action, ActionKind, Schedule, generate, simulate, with_messages

HIDDEN, HEADS, SEQUENCE, VOCABULARY, ROWS = 128, 4, 128, 2048, 8
BATCHES, RATE = 4, 1e-3
ROUNDS, WARM = 30, 4
TOLERANCE = 1e-4
BARS = {"gpipe": 0.92, "1f1b": 1.0, "interleaved": 0.9}
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
HELD = 1.1  # of the promise; buffers of messages are the rest

WHO = ("hand", "torch", "same cuts")

Step = Callable[[int], torch.Tensor]


class Work(NamedTuple):
    """What all do."""

    rank: int
    ranks: int
    layers: int
    micro_batches: int

    def model(self) -> GPT2:
        """The same on every rank and for every contestant; its head is its own, as torch's stages need it."""
        torch.manual_seed(0)
        return GPT2(
            GPT2Config(
                vocab_size=VOCABULARY,
                max_positions=SEQUENCE,
                layers=self.layers,
                hidden=HIDDEN,
                heads=HEADS,
                tied=False,
            )
        )

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """The whole batch."""
        draw = torch.Generator().manual_seed(number % BATCHES)
        ids = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=draw)
        return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def cuts(self, stages: int) -> list[int]:
        """The blocks at which the stages begin."""
        return [stage * self.layers // stages for stage in range(stages)]

    def schedule(self, kind: str) -> Schedule:
        """What all of them do."""
        return generate(kind, self.ranks, self.micro_batches, 2 if kind == "interleaved" else 1)


class Part(nn.Module):
    """A stage of the GPT, for those who cut by hand."""

    def __init__(self, model: GPT2, first: int, end: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[first:end])
        self.embed, self.position = (model.embed, model.position) if first == 0 else (None, None)
        last = end == len(model.blocks)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ids, or the residual stream, to that or logits."""
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def parts(work: Work, schedule: Schedule) -> dict[int, Part]:
    """This rank's stages."""
    model = work.model()
    begins = [*work.cuts(schedule.stages), work.layers]
    return {s: Part(model, begins[s], begins[s + 1]) for s in schedule.stages_of(work.rank)}


def adamw(modules: Sequence[nn.Module], fused: bool | None = None) -> torch.optim.Optimizer:
    """As torch makes it by default, or with its fused kernel."""
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=RATE, fused=fused)


class Contestant(NamedTuple):
    """A way to train.

    Attributes:
        step: trains on the batch of a number; gives its loss on one rank and zero on the others.
        parameters: those of this rank.
        watched: an object and the name of its method that does a forward pass of one micro-batch.
    """

    step: Step
    parameters: list[nn.Parameter]
    watched: tuple[Any, str] | None = None


def single(work: Work) -> Contestant:
    """One process with the whole batch; the others wait."""
    if work.rank:
        return Contestant(lambda number: torch.zeros(()), [])
    model = work.model()
    optimizer = adamw([model])
    batches = [work.batch(i) for i in range(BATCHES)]

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = model(**batches[number % BATCHES]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contestant(step, list(model.parameters()))


class Hand:
    """A schedule's row in a plain loop."""

    def __init__(self, work: Work, kind: str, fused: bool | None = None) -> None:
        self.schedule = with_messages(work.schedule(kind))
        self.row = self.schedule.actions[work.rank]
        self.parts = parts(work, self.schedule)
        self.optimizer = adamw(list(self.parts.values()), fused)
        self.batches = [work.batch(i) for i in range(BATCHES)]
        self.micro = work.micro_batches
        self.shape = (ROWS // work.micro_batches, SEQUENCE, HIDDEN)

    def step(self, number: int) -> torch.Tensor:
        batch = {name: x.chunk(self.micro) for name, x in self.batches[number % BATCHES].items()}
        came: dict[Action, tuple[torch.Tensor, Any]] = {}
        made: dict[Action, torch.Tensor] = {}
        graphs: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        sent: dict[tuple[ActionKind, int], tuple[torch.Tensor, Any]] = {}
        losses = []
        last = self.schedule.stages - 1
        for action in self.row:
            kind, stage, micro = action
            if kind in (ActionKind.RECV_F, ActionKind.RECV_B):
                x = torch.empty(self.shape)
                came[action] = x, self.receive(x, self.schedule.peer(action), stage)
            elif not kind.computes:
                if (kind, stage) in sent:  # one on the way, so that what was sent is let go
                    sent[kind, stage][1].wait()
                x = made.pop(action)
                tag = stage + (1 if kind is ActionKind.SEND_F else -1)
                sent[kind, stage] = x, self.send(x, self.schedule.peer(action), tag)
            elif kind is ActionKind.F:
                entered = None
                if stage:
                    entered, pending = came.pop(Action(ActionKind.RECV_F, stage, micro))
                    pending.wait()
                    entered.requires_grad_()
                out = self.forward(stage, batch["input_ids"][micro] if entered is None else entered)
                if stage == last:
                    out = token_loss(out, batch["labels"][micro]) / self.micro
                    losses.append(out.detach())
                else:
                    made[Action(ActionKind.SEND_F, stage, micro)] = out.detach()
                graphs[stage, micro] = entered, out
            else:
                entered, out = graphs.pop((stage, micro))
                if stage == last:
                    out.backward()
                else:
                    grad, pending = came.pop(Action(ActionKind.RECV_B, stage, micro))
                    pending.wait()
                    out.backward(grad)
                if entered is not None:
                    assert entered.grad is not None
                    made[Action(ActionKind.SEND_B, stage, micro)] = entered.grad
        for _, pending in sent.values():
            pending.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def send(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(x, peer, tag=tag)

    def receive(self, x: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(x, peer, tag=tag)

    def forward(self, stage: int, x: torch.Tensor) -> torch.Tensor:
        return self.parts[stage](x)


def hand(work: Work, kind: str) -> Contestant:
    """By hand."""
    made = Hand(work, kind)
    return Contestant(
        made.step, [p for part in made.parts.values() for p in part.parameters()], (made, "forward")
    )


def theirs(work: Work, kind: str, fused: bool | None = None) -> Contestant:
    """torch.distributed.pipelining."""
    schedule = work.schedule(kind)
    modules = parts(work, schedule)
    stages = [PipelineStage(m, s, schedule.stages, torch.device("cpu")) for s, m in modules.items()]
    given: Any = stages if kind == "interleaved" else stages[0]
    run = THEIRS[kind](given, n_microbatches=work.micro_batches, loss_fn=token_loss)
    optimizer = adamw(list(modules.values()), fused)
    batches = [work.batch(i) for i in range(BATCHES)]
    first, last = 0 in modules, schedule.stages - 1 in modules

    def step(number: int) -> torch.Tensor:
        batch = batches[number % BATCHES]
        losses: list[torch.Tensor] = []
        inputs = (batch["input_ids"],) if first else ()
        given = {"target": batch["labels"], "losses": losses} if last else {}
        run.step(*inputs, **given, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if last else torch.zeros(())

    return Contestant(
        step, [p for m in modules.values() for p in m.parameters()], (stages, "forward_one_chunk")
    )


def ours(work: Work, kind: str, mesh: espalier.Mesh, same: bool = False) -> Contestant:
    """Espalier's engine; with the ``same`` cuts as the others, or its own."""
    schedule = work.schedule(kind)
    model = work.model()
    plan = {
        "pipe": work.ranks,
        "schedule": kind,
        "stages_per_rank": schedule.stages // work.ranks,
        "accumulate": work.micro_batches,
        "cuts": [f"blocks.{block}" for block in work.cuts(schedule.stages)[1:]] if same else None,
    }
    engine = espalier.initialize(model, torch.optim.AdamW(model.parameters(), lr=RATE), plan, mesh=mesh)
    batches = [work.batch(i) for i in range(BATCHES)]

    def step(number: int) -> torch.Tensor:
        loss = engine.train_step(batches[number % BATCHES])
        return espalier.full_tensor(loss) if work.rank == 0 else torch.zeros(())

    engine.lay_out(batches[0])
    return Contestant(step, list(model.parameters()), (engine.stages.runtime, "_f"))


# ---- what is held


class Held(TorchDispatchMode):
    """Follows the storages that operations give; ``peak`` is the most that lived at a look."""

    def __init__(self, parameters: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self._parameters = parameters
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    storage = x.untyped_storage()
                    self._held[storage._cdata] = weakref.ref(storage)
        return out

    def look(self) -> None:
        """Add up what lives now."""
        with torch._C.DisableTorchFunctionSubclass():
            grads = [p.grad for p in self._parameters if p.grad is not None]
            known = {x.untyped_storage()._cdata for x in (*grads, *self._parameters)}
            alive = {key: storage for key, held in self._held.items() if (storage := held()) is not None}
            self.peak = max(self.peak, sum(s.nbytes() for key, s in alive.items() if key not in known))
        self._held = {key: self._held[key] for key in alive}


def promised(work: Work, kind: str) -> float:
    """Bytes that a schedule lets this rank hold."""
    schedule = work.schedule(kind)
    kept = [0.0] * schedule.stages
    labels = torch.zeros(ROWS // work.micro_batches, SEQUENCE, dtype=torch.int64)
    for stage, part in parts(work, schedule).items():
        parameters = list(part.parameters())
        with Held(parameters) as mode:
            x = torch.rand(*labels.shape, HIDDEN).requires_grad_() if stage else labels
            out = part(x)
            graph = (out if stage + 1 < schedule.stages else token_loss(out, labels)).grad_fn
            del out, x
            mode.look()
        kept[stage] = mode.peak
        del graph
    return simulate(schedule).peak_bytes(kept)[work.rank]


def held(contestant: Contestant) -> float:
    """Bytes that are held after a forward pass, at most, in one step."""
    if contestant.watched is None:
        contestant.step(0)
        return 0.0
    objects, method = contestant.watched
    objects = objects if isinstance(objects, list) else [objects]
    with Held(contestant.parameters) as mode:
        for one in objects:
            plain = getattr(one, method)

            def watched(*args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
                out = plain(*args, **kwargs)
                mode.look()
                return out

            setattr(one, method, watched)
        contestant.step(0)
        for one in objects:
            delattr(one, method)
    return mode.peak


# ---- on the ranks


class Result(NamedTuple):
    """Of one contestant: seconds of each round, losses of each step, what is held over what is promised."""

    seconds: list[float]
    losses: list[float]
    held: float


def measure(
    mesh: espalier.Mesh, micro_batches: int, layers: int, kinds: Sequence[str], rounds: int
) -> dict[str, Result]:
    """Build the contestants and let them run in turns."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank = mesh.coordinate[0]
    work = Work(rank, mesh.size(), layers, micro_batches)
    ways: dict[str, Callable[[], Contestant]] = {"single": partial(single, work)}
    promises = {"single": 1.0}
    for kind in kinds:
        ways[f"hand {kind}"] = partial(hand, work, kind)
        ways[f"torch {kind}"] = partial(theirs, work, kind)
        ways[f"espalier {kind}"] = partial(ours, work, kind, mesh)
        ways[f"same cuts {kind}"] = partial(ours, work, kind, mesh, same=True)
        promises.update(dict.fromkeys([f"{who} {kind}" for who in WHO], promised(work, kind)))
    contestants = {}
    most = {}
    for name, way in ways.items():
        contestants[name] = way()
        contestants[name].step(0)
        most[name] = held(contestants[name]) / promises.get(name, math.inf)
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in ways}

    def run(name: str) -> None:
        losses[name].append(contestants[name].step(len(losses[name])))

    turns = {name: Contender(partial(run, name), dist.barrier) for name in ways}
    times = slowest_rank(in_turns(turns, rounds=rounds, warmup=WARM))
    table = torch.stack([torch.stack(losses[name]) for name in ways]).double()
    dist.all_reduce(table)
    held_most = torch.tensor([most[name] for name in ways], dtype=torch.float64)
    dist.all_reduce(held_most, dist.ReduceOp.MAX)
    return {name: Result(times[name], table[i].tolist(), float(held_most[i])) for i, name in enumerate(ways)}


# ---- the table


def compared(ranks: int, micro_batches: int, layers: int, kinds: Sequence[str], rounds: int) -> Section:
    """Measure some schedules."""
    results = espalier.spawn(
        measure, {"pipe": ranks, "data": 1, "tensor": 1}, micro_batches, layers, kinds, rounds
    )[0]
    section = Section(
        f"{layers} layers, {ranks} ranks, {micro_batches} micro-batches",
        f"{rounds} rounds.",
        [("", "step", "over single", "over torch", "held over promised")],
    )
    seconds = {name: result.seconds for name, result in results.items()}
    for name, result in results.items():
        off = max(abs(a - b) for a, b in zip(result.losses, results["single"].losses, strict=True))
        if not off <= TOLERANCE:
            raise ValueError(
                f"{name}: a loss is {off:.1e} away from that of one process; at most {TOLERANCE:g}"
            )
        who, _, kind = name.rpartition(" ") if " " in name else (name, "", "")
        section.rows.append(
            (
                name,
                duration(statistics.median(result.seconds)),
                f"{ratio_of(seconds, name, 'single'):.2f}",
                f"{ratio_of(seconds, name, f'torch {kind}'):.2f}" if kind else "",
                f"{result.held:.2f}" if result.held and kind else "",
            )
        )
        if who == "espalier":
            section.bar(f"time of {kind} over torch's", ratio_of(seconds, name, f"torch {kind}"), BARS[kind])
        if who == "same cuts":
            section.bar(f"{kind} holds over what it promises", result.held, HELD)
    return section


def main() -> int:
    """Measure, print; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description="Pipelines, beside torch.distributed.pipelining.")
    parser.add_argument("--world", nargs="*", type=int, default=[2, 4], metavar="RANKS")
    parser.add_argument("--micro", nargs="*", type=int, default=[4, 8], metavar="MICRO-BATCHES")
    parser.add_argument("--only", nargs="*", choices=list(BARS), default=list(BARS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    sections = []
    for ranks in asked.world:
        for micro_batches in asked.micro:
            deep = [kind for kind in asked.only if kind == "interleaved" and 2 * ranks > 4]
            shallow = [kind for kind in asked.only if kind not in deep]
            for layers, kinds in ((4, shallow), (2 * ranks, deep)):
                if kinds:
                    sections.append(compared(ranks, micro_batches, layers, kinds, asked.rounds))
                    print(sections[-1].text(), flush=True)
    missed = sum(section.missed for section in sections)
    bars = sum(len(section.bars) for section in sections)
    print(f"{bars - missed} of {bars} bars hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
