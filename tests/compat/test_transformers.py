"""compat.transformers.Trainer against transformers' own on one process: a tiny GPT-2, each plan."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler

import espalier
from espalier import Plan

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PRELOAD = ("transformers",)
TOLERANCE, STEPS = 1e-6, 12  # in float32
KEPT, FEW = 8, 5  # the step of a checkpoint, and steps where fewer show it


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


class Net(nn.Module):
    """A model of one's own, which gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.config = SimpleNamespace(problem_type=None, use_cache=None)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Points(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows that are drawn anew each time; of unequal lengths, as the samplers are told."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= len(self):
            raise IndexError(i)
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(6, generator=generator) + 0.5 * torch.randn(6)
        return {"x": x, "labels": int(x.abs().sum()) % 4, "input_ids": list(range(1 + 3 * i % 7))}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The same without a length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([Points()[i] for i in range(20)])


def together(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([f["x"] for f in found]), "labels": torch.tensor([f["labels"] for f in found])}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"].unsqueeze(1).expand(-1, 2, -1).reshape(-1, 4)  # labels have other rows than it
    return F.cross_entropy(logits, labels.repeat_interleave(2), reduction="sum") / (2 * num_items_in_batch)


def fitted(
    kind: Any, folder: str, batch: int, options: dict[str, Any], **more: Any
) -> tuple[Any, list[float]]:
    common: dict[str, Any] = {
        "max_steps": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "seed": 3,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "torch_compile": False,
    }
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=batch, **(common | {"max_grad_norm": 0.5} | options)
    )
    seen = Seen()
    model = {} if {"model_init", "model"} & {*more} else {"model": Net()}
    common = {"train_dataset": Points(), "data_collator": together, "callbacks": [seen]}
    trainer = kind(**model, args=arguments, **(common | more))
    with contextlib.redirect_stdout(io.StringIO()):
        if "model_init" in more:
            trainer.evaluate(Points())
            trainer.train()
        trainer.train()
    return trainer, seen.losses


def onward(kind: Any, folder: str, batch: int, **plan: Any) -> tuple[Any, list[float]]:
    """A model goes from one Trainer to another, and back."""
    trainer, losses = fitted(kind, folder, batch, {}, **plan)
    seen = Seen()
    more = {"train_dataset": Points(), "data_collator": together, "callbacks": [seen]}
    other = kind(trainer.model, trainer.args, **more, **plan)
    with contextlib.redirect_stdout(io.StringIO()):
        other.train()
        trainer.callback_handler.callbacks += [seen]
        trainer.train()
    return trainer, [*losses, *seen.losses]


class OneKind(BatchSampler):
    """A batch of even rows in one epoch and of odd ones in the next, as sentence-transformers' have."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(range(18), batch_size, True)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield [*range(self.epoch % 2, 18, 2)][: self.batch_size]

    def __len__(self) -> int:
        return 1


class Cut(BatchSampler):
    """Four rows of an epoch, in batches that do not tell how many rows they have."""

    def __init__(self, rows: int) -> None:
        super().__init__(range(18), 1, False)
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        first = 4 * self.epoch
        return iter([[*range(first + i, first + i + self.rows)] for i in range(0, 4, self.rows)])

    def __len__(self) -> int:
        return 4 // self.rows


def loaded(kind: Any, folder: str, batch: int, **plan: Any) -> tuple[Any, list[float]]:
    """A program's loaders, of each rank's rows as ever; a stream whose last batch has fewer rows."""
    trainer, losses = None, []

    def of(which: int, trainer: Any) -> Any:
        rows, options = trainer.args.train_batch_size, {"collate_fn": together}
        if which == 0:
            return torch.utils.data.DataLoader(Stream(), rows, **options)
        if which == 1:
            return torch.utils.data.DataLoader(Points(), batch_sampler=OneKind(rows), **options)
        return torch.utils.data.DataLoader(Points(), batch_sampler=Cut(rows), **options)

    for which in range(3):

        class Own(kind):  # type: ignore[misc, valid-type]
            which_loader = which

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.args.per_device_train_batch_size = batch  # said late, as SetFit says it

            def get_train_dataloader(self) -> Any:
                return self.accelerator.prepare(of(self.which_loader, self))

        first = batch if which == 0 else 2 * batch
        trainer, found = fitted(Own, f"{folder}/{which}", first, {"per_device_eval_batch_size": 8}, **plan)
        torch.manual_seed(0)
        losses += [*found, trainer.evaluate(Stream())["eval_loss"]]
    return trainer, losses


# what went wrong without a word, or in words that told nothing, under which plans
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], list[dict[str, int]]]] = [
    ({"train_sampling_strategy": "batch_rebalance"}, {}, [{"data": 2}]),
    ({"dataloader_num_workers": 1}, {}, [{"tensor": 2}]),
    ({"gradient_accumulation_steps": 2}, {}, [{"pipe": 2, "accumulate": 2}, {"data": 2}]),
    ({"bf16": True}, {"compute_loss_func": summed}, [{"data": 2}]),
    ({}, {"compute_loss_func": summed}, [{"pipe": 2, "accumulate": 2}]),
    ({}, {"model_init": Net}, [{"data": 2, "zero": 3}]),
    ({}, {"train_dataset": Stream()}, [{"tensor": 2}]),
]


def settings(rank: int, world: int, folder: str) -> None:
    from espalier.compat.transformers import Seq2SeqTrainer, Trainer

    def by_itself(run: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """What transformers' own gives on rank 0, which knows of no other."""
        told = [None]
        if rank == 0:
            names = {name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
            launched = {name: os.environ.pop(name) for name in names}
            told[0] = run(*args, **more)[1]
            os.environ.update(launched)
        dist.broadcast_object_list(told)
        return told[0]

    method = multiprocessing.get_start_method()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # workers of loaders begin as those of programs do: a spawned rank would spawn them
        multiprocessing.set_start_method("fork", force=True)
        for i, (options, more, plans) in enumerate(SETTINGS):
            expected = by_itself(fitted, transformers.Trainer, f"{folder}/{i}-0", 4, options, **more)
            for plan in plans:
                batch = 4 // plan.get("data", 1)
                trainer, found = fitted(Trainer, f"{folder}/{i}", batch, options, plan=plan, **more)
                assert len(found) == len(expected) >= 4
                tolerance = 2e-2 if "bf16" in options else 1e-6
                for a, b in zip(expected, found, strict=True):
                    assert abs(a - b) < tolerance * max(1.0, abs(a)), (options, plan, expected, found)
            if "bf16" in options:  # as accelerate gives outputs
                assert trainer.model_wrapped(together([Points()[0]])["x"])["logits"].dtype == torch.float32
        multiprocessing.set_start_method(method, force=True)
        expected = by_itself(answered, transformers.Seq2SeqTrainer, f"{folder}/words-0", 4)
        _, found = answered(Seq2SeqTrainer, f"{folder}/words", 2, plan={"data": 2, "zero": 3})
        close(expected, found, "Seq2SeqTrainer")
        expected = by_itself(loaded, transformers.Trainer, f"{folder}/loaded-0", 4)
        _, found = loaded(Trainer, f"{folder}/loaded", 2, plan={"data": 2})
        close(expected, found, "loaders of the program")
        expected = by_itself(onward, transformers.Trainer, f"{folder}/on-0", 4)
        for plan in ({"data": 2, "zero": 3}, {"pipe": 2}):
            _, found = onward(Trainer, f"{folder}/on", 4 // plan.get("data", 1), plan=plan)
            close(expected, found, plan)


class Asking(torch.autograd.Function):
    """Asks whether autocast is on where its input lies, as kernels of a package do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        return x * 2 if not torch.is_autocast_enabled(kind) else x.to(torch.get_autocast_dtype(kind)) * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad if torch.is_autocast_enabled(grad.device.type) else grad * 2


class AskingNet(Net):
    """The same behind such a kernel."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(Asking.apply(x), labels)


class Preferring(transformers.Trainer):
    """A Trainer of another package: arguments in an order of its own, and values of all ranks in its loss."""

    def __init__(self, model: Any, reference: Any = None, args: Any = None, **more: Any) -> None:
        super().__init__(model, args, **more)
        self.reference, self.reduced = reference, 0.0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        mean = self.accelerator.pad_across_processes(outputs["logits"].detach()).mean()
        self.reduced += float(self.accelerator.reduce(mean, reduction="sum"))
        with torch.no_grad():
            before = self.reference(**inputs)["logits"]
        return outputs["loss"] + (outputs["logits"] - before).square().mean()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Of a part of the model, without what it is told of states."""
        os.makedirs(str(output_dir), exist_ok=True)
        assert float(next(iter(self.model.parameters())).detach().sum()) != 0.0  # of all ranks
        torch.save(self.model.layers.state_dict(), f"{output_dir}/own-{self.args.process_index}.pt")


def preferred(kind: Any, folder: str, batch: int, **plan: Any) -> tuple[Any, list[float]]:
    def made(model: Any, args: Any, **more: Any) -> Any:
        return kind(model, Net(), args, **more, **plan)

    trainer, losses = fitted(made, folder, batch, {}, model=AskingNet())
    return trainer, [*losses, trainer.reduced]


def of_others(rank: int, world: int, folder: str, expected: list[float]) -> None:
    """Trainers of other packages, which the Trainer stands before."""
    from espalier.compat.transformers import Trainer

    class Here(Trainer, Preferring):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for plan in ({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}):
            trainer, found = preferred(Here, folder, 4 // plan.get("data", 1), plan=plan)
            close(expected, found, plan)
            trainer.save_model(folder)
            assert not Path(folder, "own-1.pt").exists(), "one rank writes"
            for name, x in torch.load(f"{folder}/own-0.pt").items():
                assert type(x) is torch.Tensor and x.equal(trainer.engine.state_dict()[f"layers.{name}"])
    with pytest.raises(ValueError, match=r"args(.|\n)*expected the TrainingArguments of its kind"):
        Here(Net(), Net(), train_dataset=Points(), plan={"data": 2})
    with pytest.raises(TypeError, match="multiple values"):
        Here(Net(), Net(), reference=Net())
    arguments = transformers.TrainingArguments(
        folder, report_to=[], use_cpu=True, per_device_train_batch_size=4
    )
    arguments.generation_batch_size, arguments.steps_per_generation = 16, 1  # of TRL, which counts each rank
    for plan, generations, rows in (({"tensor": 2}, 4, 4), ({"data": 2}, 4, 8), ({"tensor": 2}, 8, 0)):
        arguments.num_generations = generations
        with contextlib.nullcontext() if rows else pytest.raises(ValueError, match="num_generations"):
            Here(Net(), args=arguments, train_dataset=Points(), plan=plan)
            assert arguments.generation_batch_size == rows


def answered(kind: Any, folder: str, batch: int, **plan: Any) -> tuple[Any, list[float]]:
    """A Seq2SeqTrainer, its losses, and what it generates."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(2, 24, (6, n), generator=generator) for n in (5, 3))
    data = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    words = {"vocab_size": 24, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(**words, **sizes)
    arguments = transformers.Seq2SeqTrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        max_steps=2,
        learning_rate=0.05,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=5,
    )
    seen = Seen()
    model = transformers.T5ForConditionalGeneration(config)
    trainer = kind(model, arguments, train_dataset=data, callbacks=[seen], **plan)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    words = trainer.predict(data[:3]).predictions
    return trainer, [*seen.losses, *words.reshape(-1).tolist()]


def compiled(rank: int, world: int, folder: str) -> None:
    """torch_compile compiles; a process has one device, however many there are; a plan's own words hold."""
    from espalier.compat.transformers import Trainer

    told: list[Any] = []

    def initialize(*args: Any, compile: Any, **kwargs: Any) -> Any:
        told.append(compile)
        return espalier.initialize(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("espalier.compat.transformers.initialize", initialize)
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        options = {"torch_compile_backend": "eager", "ddp_bucket_cap_mb": 3, "use_cpu": False, "bf16": False}
        arguments = transformers.TrainingArguments(folder, report_to=[], **options)
        trainer = Trainer(Net(), arguments, train_dataset=Points())
        assert trainer.engine.plan.chunk_megabytes == 3 and told == ["eager"]
        assert trainer._train_batch_size == 8 * world and arguments.n_gpu <= 1
        # programs take their part of what they gather: here each rank has all
        own = trainer.accelerator
        assert (own.num_processes, own.process_index, own.is_main_process) == (1, 0, rank == 0)
        again = Trainer(trainer.model, arguments, train_dataset=Points())
        assert again.engine is trainer.engine and again._train_batch_size == 8 * world
    other = Trainer(trainer.model, arguments, plan={"tensor": world})
    with pytest.raises(ValueError, match=r"Net': it is laid out already, by data(.|\n)*save_model"):
        _ = other.engine


def refused(rank: int, world: int, folder: str) -> None:
    from espalier.compat.transformers import Trainer

    arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"plan.accumulate(.|\n)*gradient_accumulation_steps"):
        Trainer(model(), arguments, plan={"data": 2, "accumulate": 2})
    several = {"auto_find_batch_size": True, "enable_jit_checkpoint": True, "bf16_full_eval": True}
    arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], **several)
    with pytest.raises(ValueError, match=r"3 mistakes(.|\n)*autocast(.|\n)*espalier plan(.|\n)*save_steps"):
        Trainer(model(), arguments)
    arguments = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"hyperparameter_search(.|\n)*each rank would draw"):
        Trainer(model(), arguments).hyperparameter_search()
    arguments.fp16 = True
    with pytest.raises(ValueError, match=r"fp16(.|\n)*bfloat16(.|\n)*espalier.prepare"):
        Trainer(model(), arguments, plan={"pipe": 2})


@pytest.mark.long
def test_the_trainer_under_plans(ranks: Any, tmp_path: Path) -> None:
    (expected,) = ranks(1, own, str(tmp_path / "own"))
    for i, plan in enumerate(({"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2, "accumulate": 2})):
        ranks(2, ours, str(tmp_path / f"ours{i}"), plan, expected)
    ranks(2, searched, str(tmp_path / "searched"), expected)
    ranks(2, refused, str(tmp_path / "refused"))


def test_what_arguments_ask_for(ranks: Any, tmp_path: Path) -> None:
    ranks(2, settings, str(tmp_path))
    ranks(2, compiled, str(tmp_path / "compiled"))


def of_one(rank: int, world: int, folder: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return preferred(Preferring, folder, 4)[1]


def test_trainers_of_other_packages(ranks: Any, tmp_path: Path) -> None:
    (expected,) = ranks(1, of_one, str(tmp_path / "own"))
    ranks(2, of_others, str(tmp_path / "ours"), expected)


def test_each_argument_is_told_of() -> None:
    """On the page: as it is, to what it is, or why not."""
    page = (Path(__file__).parents[2] / "docs/transformers-trainer.md").read_text("utf-8")
    told = re.findall(r"`(\w+)", page)
    names = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert [name for name in names if name not in told] == []
