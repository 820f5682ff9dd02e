"""compat.transformers.Trainer against transformers' own on one process: a tiny GPT-2, each plan."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import Plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PRELOAD = ("transformers",)
TOLERANCE, STEPS = 1e-6, 20  # in float32
KEPT, FEW = 16, 5  # the step of a checkpoint, and steps where fewer show it


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=48,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def rows(n: int = 20) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 48, (n, 8), generator=generator)
    labels = ids.clone()
    for i in range(n):
        labels[i, : i % 4] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction
    right = (logits.argmax(-1)[:, :-1] == labels[:, 1:]) & (labels[:, 1:] != -100)
    return {"accuracy": float(right.sum() / (labels[:, 1:] != -100).sum())}


class Seen(transformers.TrainerCallback):
    """A callback that takes down the losses, and stops."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.stop = STEPS

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.losses += [
            value for key, value in (logs or {}).items() if key in ("loss", "grad_norm", "eval_loss")
        ]


def run(
    kind: Any,
    folder: str,
    rank_batch: int,
    resume: bool = False,
    stop: int = STEPS,
    smoothing: float = 0.0,
    **plan: Any,
) -> tuple[Any, list[float]]:
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=rank_batch,
        per_device_eval_batch_size=5,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=0.01,
        weight_decay=0.1,
        max_grad_norm=0.5,
        label_smoothing_factor=smoothing,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        save_steps=KEPT,
        seed=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    seen = Seen()
    seen.stop = stop
    trainer = kind(
        model(),
        arguments,
        train_dataset=rows(),
        eval_dataset=rows(7),
        compute_metrics=accuracy,
        callbacks=[seen],
        **plan,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        middle = os.path.join(folder, f"checkpoint-{KEPT}")
        trainer.train(resume_from_checkpoint=middle if resume else None)
        losses = [*seen.losses]
    return trainer, losses


def own(rank: int, world: int, folder: str) -> tuple[list[float], dict[str, Any], Any, Any, list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, losses = run(transformers.Trainer, folder, 4)
        predicted = trainer.predict(rows(3)).predictions
        _, smoothed = run(transformers.Trainer, f"{folder}/smoothed", 4, stop=FEW, smoothing=0.1)
        return losses, trainer.evaluate(), trainer.model.state_dict(), predicted, smoothed


def close(expected: list[float], found: list[float], what: Any) -> None:
    assert len(expected) == len(found), (what, expected, found)
    for a, b in zip(expected, found, strict=True):
        assert abs(a - b) < TOLERANCE * max(1.0, abs(a)), (what, expected, found)


def migrated() -> Any:
    """What a program that imports the Trainer has of it, after ``espalier migrate``."""
    from espalier.compat.migrate import migrate

    names: dict[str, Any] = {}
    exec(migrate("from transformers import Trainer\n").after, names)
    return names["Trainer"]


def ours(rank: int, world: int, folder: str, plan: dict[str, Any], expected: Any) -> None:
    Trainer = migrated()
    losses, metrics, weights, predictions, _ = expected
    per_rank = 4 // plan.get("data", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, found = run(Trainer, folder, per_rank, plan=plan)
        told, predicted = trainer.evaluate(), trainer.predict(rows(3)).predictions
        trainer.save_model(os.path.join(folder, "final"))
    close(losses, found, plan)
    for name in ("eval_loss", "eval_accuracy"):
        assert abs(told[name] - metrics[name]) < TOLERANCE
    assert predicted.shape == predictions.shape and abs(predicted - predictions).max() < 1e-4
    again = transformers.GPT2LMHeadModel.from_pretrained(os.path.join(folder, "final"))
    for name, x in again.state_dict().items():
        if name.endswith("c_attn.bias"):  # those of keys have no gradient but rounding, which AdamW blows up
            x[16:32] = weights[name][16:32]
        assert (x - weights[name]).abs().max() < 1e-5, (plan, name)
    assert trainer.is_world_process_zero() == (rank == 0) and trainer.engine.plan.zero == plan.get("zero", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, after = run(Trainer, folder, per_rank, resume=True, plan=plan)
    assert len(after) > 2 * (STEPS - KEPT)
    close(found[-len(after) :], after, plan)


def searched(rank: int, world: int, folder: str, expected: Any) -> None:
    """plan="auto": whichever is found has the losses of one process on the rows of all ranks."""
    Trainer = migrated()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, found = run(Trainer, folder, 4 // world, stop=FEW, plan="auto", cluster="h100-sxm")
    assert len(found) == 2 * FEW
    close(expected[0][: 2 * FEW], found, trainer.plan)
    assert trainer.plan.why.startswith("best of") and trainer.plan.pipe == trainer.plan.accumulate == 1
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("espalier.compat.transformers.auto", lambda *given, **more: Plan(tensor=world))
        few = {"stop": FEW, "smoothing": 0.1}
        folder = os.path.join(folder, "tensor")
        trainer, found = run(Trainer, folder, 4 // world, **few, plan="auto", cluster="v100-sxm")
    assert trainer.plan.tensor == world and len(found) == 2 * FEW
    close(expected[4], found, trainer.plan)
    with pytest.raises(ValueError, match=r"cluster(.|\n)*shipped: (.|\n)*h100-sxm"):
        Trainer(model(), trainer.args, train_dataset=rows(), plan="auto")


def refused(rank: int, world: int, folder: str) -> None:
    from espalier.compat.transformers import Trainer

    arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"plan.accumulate(.|\n)*gradient_accumulation_steps"):
        Trainer(model(), arguments, plan={"data": 2, "accumulate": 2})
    arguments.fp16 = True
    with pytest.raises(ValueError, match=r"fp16(.|\n)*bfloat16(.|\n)*espalier.prepare"):
        Trainer(model(), arguments, plan={"pipe": 2})


def test_the_trainer_under_plans(ranks: Any, tmp_path: Path) -> None:
    (expected,) = ranks(1, own, str(tmp_path / "own"))
    for i, plan in enumerate(({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2, "accumulate": 2})):
        ranks(2, ours, str(tmp_path / f"ours{i}"), plan, expected)
    ranks(2, searched, str(tmp_path / "searched"), expected)
    ranks(2, refused, str(tmp_path / "refused"))
