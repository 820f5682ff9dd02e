"""Batches for a model of transformers, made by what its ``forward`` takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

ROWS, LENGTH, FRAMES, SAMPLES = 8, 12, 32, 800
Batch = dict[str, Any]

BINS = (
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "input_dim",
    "n_mels",
    "audio_channels",
    "mel_bins",
)
CLASSES = ("ImageClassification", "SequenceClassification", "AudioClassification", "VideoClassification")
DENSE = ("SemanticSegmentation",)
TOKENS = (
    "CausalLM",
    "LMHead",
    "MaskedLM",
    "ForConditionalGeneration",
    "ForCTC",
    "TokenClassification",
    "Speech2Text",
)


def _find(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of some names that a config, or a config that it holds, has a value for."""
    held = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    for name in names:
        for part in held:
            found = getattr(part, name, None) if part is not None else None
            if found is not None:
                return found
    return default


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


class Maker:
    """Makes batches for one model."""

    def __init__(self, model: nn.Module, generator: torch.Generator) -> None:
        self.model, self.config, self.generator = model, getattr(model, "config", None), generator
        self.takes = set(inspect.signature(model.forward).parameters)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def ids(self, rows: int, length: int) -> torch.Tensor:
        high = _find(self.config, ("vocab_size",), 96)
        special = {
            value
            for part in (
                self.config,
                *(getattr(self.config, p, None) for p in getattr(self.config, "sub_configs", {})),
            )
            for key, value in (vars(part).items() if part is not None else ())
            if key.endswith(("token_id", "token_index")) and isinstance(value, int)
        }
        usable = torch.tensor([i for i in range(4, min(high, 96)) if i not in special])
        return usable[torch.randint(0, len(usable), (rows, length), generator=self.generator)]

    def image(self) -> torch.Tensor:
        height, width = _pair(_find(self.config, ("image_size",), 32))
        channels = _find(self.config, ("num_channels", "in_chans", "in_channels", "stem_channels"), 3)
        return self.floats(ROWS, channels if channels in (1, 3) else 3, height, width)

    def labels(self, rows: int, length: int, batch: Batch) -> dict[str, Any]:
        name = type(self.model).__name__
        if "labels" not in self.takes:
            return {}
        if any(word in name for word in CLASSES):
            return {"labels": torch.randint(0, self.config.num_labels, (rows,), generator=self.generator)}
        if any(word in name for word in DENSE):
            size = batch["pixel_values"].shape[-2:]
            classes = self.config.num_labels
            return {"labels": torch.randint(0, classes, (rows, *size), generator=self.generator)}
        if any(word in name for word in TOKENS):
            decoder = "decoder_input_ids" in self.takes or "input_ids" not in batch
            ids = (
                self.ids(rows, length // 2 if "ForCTC" in name else length) if decoder else batch["input_ids"]
            )
            return {"labels": ids}
        return {}

    def text(self) -> Batch:
        """Tokens, with what goes with them."""
        batch: Batch = {"input_ids": self.ids(ROWS, LENGTH)}
        if "bbox" in self.takes:
            corners = torch.randint(0, 50, (ROWS, LENGTH, 4), generator=self.generator)
            corners[..., 2:] += corners[..., :2]
            batch["bbox"] = corners
        return batch

    def sounds(self) -> Iterator[Batch]:
        """Frames or samples of sound."""
        if "input_features" in self.takes:
            bins = _find(self.config, BINS, 16)
            frames = 2 * _find(self.config, ("max_source_positions",), FRAMES // 2)
            for shape in (
                (ROWS, bins, min(frames, 64)),
                (ROWS, frames, bins),
                (ROWS, FRAMES, bins),
                (ROWS, bins, 128),
            ):
                features = self.floats(*shape)
                mask = {"attention_mask", "input_features_mask", "feature_attention_mask"} & self.takes
                yield {"input_features": features}
                for name in sorted(mask):
                    for length in {shape[1], shape[2]}:
                        yield {"input_features": features, name: torch.ones(ROWS, length, dtype=torch.long)}
        if "input_values" in self.takes:
            frames, bins = (_find(self.config, (n,), 0) for n in ("max_length", "num_mel_bins"))
            if frames and bins:
                yield {"input_values": self.floats(ROWS, frames, bins)}
            yield {"input_values": self.floats(ROWS, SAMPLES)}
            yield {"input_values": self.floats(ROWS, 1, 2 * SAMPLES)}
            yield {"input_values": self.floats(ROWS, 16, 16)}

    def pictures(self) -> Iterator[Batch]:
        """Images, or films."""
        if "pixel_values" in self.takes:
            image = self.image()
            frames = _find(self.config, ("num_frames", "frames_per_clip"), None)
            if frames:
                yield {"pixel_values": image[:, None].expand(-1, frames, -1, -1, -1).contiguous()}
            yield {"pixel_values": image}
            yield {"pixel_values": self.floats(ROWS, 3, 64, 64)}
        for name in ("pixel_values_videos", "pixel_values_images"):
            if name in self.takes:
                frames = _find(self.config, ("frames_per_clip", "num_frames"), 2)
                yield {
                    name: self.floats(
                        ROWS, frames, 3, *_pair(_find(self.config, ("image_size", "crop_size"), 32))
                    )
                }

    def seen_and_said(self) -> Iterator[Batch]:
        """An image among the tokens of a text, as models of both take it."""
        token = _find(self.config, ("image_token_id", "image_token_index"), None)
        features = getattr(self.model, "get_image_features", None)
        if token is None or features is None:
            return
        for pictures in self.pictures():
            try:
                with torch.no_grad():
                    found = features(**{k: v[:1] for k, v in pictures.items()})
            except Exception:
                continue
            found = getattr(found, "pooler_output", found)
            found = found[0] if isinstance(found, tuple | list) else found
            count = found.numel() // found.shape[-1]
            if count > 40:
                continue
            ids = torch.cat([torch.full((ROWS, count), token), self.ids(ROWS, LENGTH)], 1)
            batch = {**pictures, "input_ids": ids}
            if "token_type_ids" in self.takes or "mm_token_type_ids" in self.takes:
                kinds = (ids == token).long()
                batch |= {
                    name: kinds for name in ("token_type_ids", "mm_token_type_ids") if name in self.takes
                }
            yield {**batch, "labels": ids.masked_fill(ids == token, -100)}

    def candidates(self) -> Iterator[Batch]:
        """What the model may take, likely things first."""
        main = getattr(self.model, "main_input_name", "")
        if {"input_ids", "pixel_values"} <= self.takes:
            yield from self.seen_and_said()
            for pictures in self.pictures():
                batch = {**self.text(), **pictures}
                if "return_loss" in self.takes:
                    yield {**batch, "return_loss": True}
                yield {**batch, **self.labels(ROWS, LENGTH, batch)}
                yield batch
        if {"input_ids", "input_features"} <= self.takes or {"input_ids", "input_values"} <= self.takes:
            for sounds in self.sounds():
                batch = {**self.text(), **sounds}
                if "return_loss" in self.takes:
                    yield {**batch, "return_loss": True}
        first = [self.sounds(), self.pictures()] if main != "input_ids" else []
        for kinds in first:
            for batch in kinds:
                given = {**batch, **self.labels(ROWS, LENGTH, batch)}
                yield given
                if "decoder_input_ids" in self.takes:
                    yield {**batch, "decoder_input_ids": self.ids(ROWS, LENGTH)}
                if given is not batch:
                    yield batch
        if "input_ids" in self.takes:
            batch = self.text()
            yield {**batch, **self.labels(ROWS, LENGTH, batch)}
            if "decoder_input_ids" in self.takes:
                yield {**batch, "decoder_input_ids": self.ids(ROWS, LENGTH)}
            yield batch
        if "past_values" in self.takes:
            length = _find(self.config, ("context_length",), 32)
            channels = _find(self.config, ("num_input_channels", "input_size"), 1)
            batch = {"past_values": self.floats(ROWS, length, channels)}
            future = _find(self.config, ("prediction_length",), 0)
            if "past_time_features" in self.takes:
                lags = max(self.config.lags_sequence)
                past = self.floats(ROWS, length + lags)
                yield {
                    "past_values": past,
                    "past_time_features": self.floats(ROWS, length + lags, 1),
                    "past_observed_mask": torch.ones_like(past),
                    "future_values": self.floats(ROWS, future),
                    "future_time_features": self.floats(ROWS, future, 1),
                }
            if future and "future_values" in self.takes:
                yield {**batch, "future_values": self.floats(ROWS, future, channels)}
            yield batch
        for name in ("hidden_states", "inputs_embeds", "latents", "spectrogram"):
            if name in self.takes:
                width = _find(self.config, ("hidden_size", "d_model", "model_in_dim"), 32)
                yield {name: self.floats(ROWS, LENGTH, width)}


def candidates(model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
    """Batches that a model may take, likely ones first."""
    return Maker(model, generator).candidates()


# ---- tokens as programs give them


def _left(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    return {"attention_mask": (column >= row % 4).long()}


def _right(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    return {"attention_mask": (column < LENGTH - row % 4).long()}


def _packed(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    first = 3 + row % 5  # tokens of the first of two sequences
    return {"position_ids": torch.where(column >= first, column - first, column)}


def _packed_uncached(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    return {**_packed(model, batch, row, column), "use_cache": False}


def _blocks(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    seen = (column <= column.T).expand(ROWS, 1, -1, -1).clone()
    seen[1::2, :, 6:, :6] = False
    return {"attention_mask": seen}


def _scores(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    seen = _blocks(model, batch, row, column)["attention_mask"]
    lowest = torch.finfo(torch.float64).min
    return {"attention_mask": torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)}


def _embedded(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    waves = torch.arange(width, dtype=torch.float64) * (1.0 + batch["input_ids"][..., None])
    return {"input_ids": None, "inputs_embeds": waves.sin()}


def _ignored(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    return {"labels": batch["labels"].masked_fill((column + row) % 3 == 0, -100)}


def _typed(model: nn.Module, batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    return {"token_type_ids": (column + row) % 2}


FORMS = {
    "left": _left,  # padded
    "right": _right,
    "packed": _packed,
    "packed-uncached": _packed_uncached,
    "blocks": _blocks,
    "scores": _scores,
    "embedded": _embedded,
    "ignored": _ignored,
    "typed": _typed,
    "hidden": lambda *_: {"output_hidden_states": True},
    "attentions": lambda *_: {"output_attentions": True},
    "tuples": lambda *_: {"return_dict": False},
    "last": lambda *_: {"labels": None, "logits_to_keep": 3},
}
"""What batches of tokens get beside them, or in the place of some."""


def varied(form: str, model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
    """Batches that have tokens, in one of the :data:`FORMS`."""
    row, column = torch.arange(ROWS)[:, None], torch.arange(LENGTH)[None]
    takes = {"output_hidden_states", "output_attentions", "return_dict", *Maker(model, generator).takes}
    for batch in candidates(model, generator):
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if ids is None or ids.shape != (ROWS, LENGTH):
            continue
        if form != "ignored" or (labels is not None and labels.shape == ids.shape):
            given = FORMS[form](model, batch, row, column)
            if given.keys() <= takes:
                yield {key: x for key, x in {**batch, **given}.items() if x is not None}
