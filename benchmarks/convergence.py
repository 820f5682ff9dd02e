"""Convergence: the same model trained on one process and under every mix, its curves laid over each other.

* A ViT on scikit-learn's digits (1,797 images of 8 x 8): loss, and accuracy on images kept apart.
* A GPT on the source text of Python's standard library: loss, and loss on text kept apart.
* The first steps of the paper's own ViT-S/16 (arXiv 2110.14883: 12 layers of 384, 6 heads, images of
  224 x 224, AdamW at 0.003 with decay 0.3), on the digits, enlarged; not its 250 epochs of ImageNet.

Data parallelism with ZeRO-3 on 4 ranks, the tensor modes 1d (with sequence parallelism) and 2d on 4 ranks,
2.5d and 3d on 8, and for the GPT ring attention on 4 (an image has no sequence to cut). In float64, so that
what is compared is the algorithm and not the order of sums, and at a rate at which training is not chaotic.
Bars: no loss, accuracy or parameter is further from the single process than 1e-6; and the first two models
learn (accuracy above 0.85, loss below that of token counts).

    python benchmarks/convergence.py --write docs/pictures/convergence.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import espalier
from espalier.models import build
from espalier.tensor import full_tensor
from espalier.train.corpus import prepare_text

TOLERANCE = 1e-6
LOOKS = 10  # between two looks at what is kept apart
PLANS: Mapping[str, dict[str, Any]] = {
    "single process": {},
    "data 4, ZeRO-3": {"data": 4, "zero": 3},
    "1d": {"tensor": 4, "sequence_parallel": True},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
    "ring": {"context": 4, "context_kind": "ring"},
}
Batch = dict[str, torch.Tensor]


@dataclass
class Task:
    """What is learned.

    Attributes:
        kind, sizes: of the model.
        batch: the global batch of a step.
        kept: what is looked at every few steps.
        score: of the kept batch's output: its name, and the number.
        plans: names of those that apply.
        rate, decay: of AdamW.
        steps: of a run.
    """

    kind: str
    sizes: dict[str, Any]
    batch: Callable[[int], Batch]
    kept: Batch
    score: tuple[str, Callable[[Any, Batch], torch.Tensor]]
    plans: list[str] = field(default_factory=lambda: list(PLANS))
    rate: float = 3e-3
    decay: float = 0.01
    steps: int = 60


@dataclass
class Curves:
    """Of one run: the loss of each step, the score at each look, all parameters at the end, flat."""

    losses: list[float]
    scores: list[float]
    parameters: torch.Tensor

    def apart(self, other: Curves) -> float:
        """The largest difference."""
        pairs = [(self.losses, other.losses), (self.scores, other.scores)]
        numbers = [abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)]
        return max(*numbers, (self.parameters - other.parameters).abs().max().item())


def digits() -> Task:
    """A ViT of 2 x 64 on patches of 4 x 4."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float64).view(-1, 1, 8, 8) / 16
    pixels = 3 * (pixels - 0.3)  # about mean 0, variance 1
    classes = torch.tensor(labels)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    kept, rest = order[:256], order[256:]

    def batch(step: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        rows = rest[torch.randint(0, len(rest), (64,), generator=draw)]
        return {"pixel_values": pixels[rows], "labels": classes[rows]}

    def accuracy(output: Any, rows: Batch) -> torch.Tensor:
        return (full_tensor(output.logits).argmax(-1) == rows["labels"]).double().mean()

    return Task(
        "vit",
        {"image": 8, "patch": 4, "channels": 1, "layers": 2, "hidden": 64, "heads": 4},
        batch,
        {"pixel_values": pixels[kept], "labels": classes[kept]},
        ("accuracy on images kept apart", accuracy),
        [name for name in PLANS if name != "ring"],
        rate=1e-3,
        steps=150,
    )


def vit_small() -> Task:
    """The paper's ViT-S/16 for a few steps; too few for a look at what is kept apart."""
    small = digits()

    def enlarged(rows: Batch) -> Batch:
        pixels = torch.nn.functional.interpolate(rows["pixel_values"][:8].expand(-1, 3, -1, -1), size=224)
        return {"pixel_values": pixels, "labels": rows["labels"][:8]}

    return Task(
        "vit",
        {"image": 224, "patch": 16, "channels": 3, "layers": 12, "hidden": 384, "heads": 6},
        lambda step: enlarged(small.batch(step)),
        enlarged(small.kept),
        small.score,
        small.plans,
        rate=3e-3,
        decay=0.3,
        steps=3,
    )


def text(cache: Path) -> tuple[Task, float]:
    """A GPT of 2 x 32 on 64 tokens; and the loss of a model that only knows how often each token occurs."""
    found = prepare_text(
        source="stdlib", pattern="*.py", cache=cache, vocab_size=512, max_bytes=2_000_000, val_fraction=0.1
    )

    def window(tokens: Any, starts: torch.Tensor) -> Batch:
        rows = torch.stack([torch.tensor(tokens[s : s + 65].astype("int64")) for s in starts.tolist()])
        return {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def batch(step: int) -> Batch:
        draw = torch.Generator().manual_seed(step)
        return window(found.train, torch.randint(0, len(found.train) - 65, (16,), generator=draw))

    kept = window(found.val, torch.arange(16) * ((len(found.val) - 65) // 16))
    sizes = {"vocab_size": 512, "max_positions": 64, "layers": 2, "hidden": 32, "heads": 4}
    score = ("loss on text kept apart", lambda output, rows: full_tensor(output.loss))
    return Task("gpt", sizes, batch, kept, score), found.entropy


def train(mesh: espalier.Mesh, which: str, name: str, cache: str) -> Curves:
    """One run (on each rank)."""
    torch.set_num_threads(1)
    task = {"digits": digits, "vit-s16": vit_small, "text": lambda: text(Path(cache))[0]}[which]()
    torch.manual_seed(0)
    model = build(task.kind, task.sizes).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=task.decay)
    plan = espalier.Plan(**PLANS[name])
    engine = espalier.initialize(model, optimizer, plan, mesh=mesh, example=task.batch(0))
    size = len(task.kept["labels"])
    kept = engine.local_batch({k: v[engine.batch_rows(size)] for k, v in task.kept.items()}, size)
    losses, scores = [], []
    for step in range(task.steps):
        losses.append(engine.train_step(task.batch(step)).item())
        if step % LOOKS == LOOKS - 1:
            with torch.no_grad():
                scores.append(float(task.score[1](engine.module(**kept), task.kept)))
    whole = engine.full_state_dict()
    flat = torch.cat([whole[name].double().flatten() for name, _ in model.named_parameters()])
    return Curves(losses, scores, flat)


def draw(found: Mapping[str, dict[str, Curves]], scores: Mapping[str, str], to: Path) -> None:
    """All curves of a quantity in one picture, and below how far each is from the single process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "espalier"
    figure, grid = pyplot.subplots(2, 4, figsize=(17, 7), height_ratios=(3, 2), layout="constrained")
    for i, (which, runs) in enumerate(found.items()):
        single = runs["single process"]
        for j, quantity in enumerate(("losses", "scores")):
            above, below = grid[0][2 * i + j], grid[1][2 * i + j]
            above.set_title(f"{which}: {'loss of a step' if j == 0 else scores[which]}")
            for n, (name, run) in enumerate(runs.items()):
                mine, theirs = getattr(run, quantity), getattr(single, quantity)
                at = range(1, len(mine) + 1) if j == 0 else range(LOOKS, LOOKS * len(mine) + 1, LOOKS)
                # thinner and thinner, so that those below can be seen
                above.plot(at, mine, label=name, linewidth=2 * (len(runs) - n), color=f"C{n}", alpha=0.7)
                if name != "single process":
                    apart = [max(abs(a - b), 1e-17) for a, b in zip(mine, theirs, strict=True)]
                    below.semilogy(at, apart, label=name, color=f"C{n}")
            below.set_title("difference from the single process")
            below.axhline(TOLERANCE, color="black", linestyle=":")
            below.set_xlabel("step")
        grid[0][2 * i].legend()
    figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None)
    print(f"wrote {to}")


def main() -> int:
    """Train all, print the table, draw the picture; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cache", default=str(Path.home() / ".cache" / "espalier"))
    parser.add_argument("--write", type=Path, help="the picture's file")
    given = parser.parse_args()
    learned, counts = text(Path(given.cache))
    tasks = {"digits": digits(), "text": learned, "vit-s16": vit_small()}
    found: dict[str, dict[str, Curves]] = {}
    missed = 0
    print(f"{'':8}{'':16}{'ranks':>6}{'first loss':>12}{'last loss':>12}{'score':>9}{'apart':>10}   bar")
    for which, task in tasks.items():
        runs = found[which] = {}
        for name in task.plans:
            axes = espalier.Plan(**PLANS[name]).axes
            runs[name] = run = espalier.spawn(train, axes, which, name, given.cache)[0]
            apart = run.apart(runs["single process"])
            missed += apart > TOLERANCE
            ranks = espalier.Plan(**PLANS[name]).world_size
            score = f"{run.scores[-1]:.4f}" if run.scores else ""
            print(
                f"{which:8}{name:16}{ranks:6}{run.losses[0]:12.4f}{run.losses[-1]:12.4f}{score:>9}"
                f"{apart:10.1e}   {TOLERANCE:g} {'PASS' if apart <= TOLERANCE else 'MISS'}",
                flush=True,
            )
    accuracy, loss = (found[which]["single process"].scores[-1] for which in ("digits", "text"))
    print(f"accuracy of the ViT {accuracy:.3f} (bar: above 0.85) {'PASS' if accuracy > 0.85 else 'MISS'}")
    print(f"loss of the GPT {loss:.3f} (bar: below {counts:.3f}) {'PASS' if loss < counts else 'MISS'}")
    worst = max(run.apart(runs["single process"]) for runs in found.values() for run in runs.values())
    print(f"largest difference {worst:.1e}")
    if given.write is not None:
        looked = {
            which: task.score[0] for which, task in tasks.items() if found[which]["single process"].scores
        }
        draw({which: found[which] for which in looked}, looked, given.write)
    return int(missed > 0 or accuracy <= 0.85 or loss >= counts)


if __name__ == "__main__":
    sys.exit(main())
