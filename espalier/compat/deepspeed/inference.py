"""``deepspeed.init_inference``: a model laid out along a tensor axis, which answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.config import load
from espalier.compat.deepspeed.groups import init_distributed
from espalier.engine import Engine, EngineModule, initialize
from espalier.mesh.process import running_size
from espalier.texts import MistakeError, dtype_name, unknown_key

_OWNER: Final = "deepspeed.init_inference"
_WORDS: Final = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "float": "float32",
}
_ALIASES: Final = {
    "tp": "tensor_parallel",
    "kernel_inject": "replace_with_kernel_inject",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "args": "config",
}
# models run as they are written, by torch's kernels
_IDLE: Final = frozenset(
    "replace_with_kernel_inject replace_method enable_cuda_graph use_triton triton_autotune return_tuple "
    "triangular_masking max_out_tokens min_out_tokens set_empty_params keep_module_on_host transposed_mode "
    "base_dir training_mp_size config".split()
)
_LAYOUTS: Final = 'how layers are cut is seen in the model: pass layouts={"*.q_proj": "column"} for others'
_REFUSED: Final = {
    "quant": "weights are not quantised",
    "injection_policy": _LAYOUTS,
    "injection_policy_tuple": _LAYOUTS,
    "zero": 'say plan={"zero": 3}',
    "moe": 'say plan={"expert": n}: experts are found in the model',
    "ep_size": 'say plan={"expert": n}: experts are found in the model',
    "mpu": "say tensor_parallel={'tp_size': n}",
    "checkpoint_config": "checkpoint= takes a file or a folder of any format",
    "save_mp_checkpoint_path": "engine.engine.export(path) writes one file for any number of ranks",
}


class InferenceEngine(EngineModule):
    """What ``init_inference`` gives: a call answers with the model's output for this rank's rows.

    Ranks of one tensor axis are given the same rows.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, rows="own")
        self.eval()
        self.mp_world_size = int(engine.plan.tensor)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, without gradients."""
        return super().forward(*args, **kwargs)

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        attention_mask: torch.Tensor | None = None,
        eos_token_id: int | Iterable[int] | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue ``input_ids`` [batch, sequence], the same on all ranks, by the likeliest tokens.

        Args:
            do_sample: draw them, at a ``temperature``, among the ``top_k`` likeliest.
            max_length: with the prompt, in place of ``max_new_tokens``; by default 20 new ones.
            eos_token_id: ends a row, which is filled with ``pad_token_id``; by default what the model's
                ``generation_config`` says.

        Raises:
            ValueError: prompts are padded.
        """
        ids = inputs if input_ids is None else input_ids
        if ids is None:
            raise ValueError("InferenceEngine.generate: expected input_ids=[batch, sequence].")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("InferenceEngine.generate: expected prompts of one length, without padding.")
        length = ids.shape[1]
        if max_new_tokens is None:
            max_new_tokens = 20 if max_length is None else max(max_length - length, 0)
        made = self.engine.generate(
            ids,
            max_new_tokens,
            temperature=temperature if do_sample else 0.0,
            top_k=top_k if do_sample else None,
            generator=generator,
            cache=use_cache,
        )
        settings = getattr(self.module, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None) if eos_token_id is None else eos_token_id
        if ends is None:
            return made
        ends = [ends] if isinstance(ends, int) else list(ends)
        fill = getattr(settings, "pad_token_id", None) if pad_token_id is None else pad_token_id
        return _ended(made, length, ends, ends[0] if fill is None else fill)

    def compile(self, backend: Any = "inductor", *args: Any, **kwargs: Any) -> None:
        """Compile the model's blocks, collectives included."""
        self.engine.compile(backend)

    def destroy(self) -> None:
        """Nothing outlives it."""


def _ended(ids: torch.Tensor, start: int, ends: list[int], fill: int) -> torch.Tensor:
    """Rows as if each had ended at its first end, behind the prompt."""
    is_end = torch.isin(ids[:, start:], torch.tensor(ends, device=ids.device))
    before = is_end.cumsum(1) - is_end.long()  # ends before each place
    new = ids[:, start:].masked_fill(before > 0, fill)
    lengths = (before == 0).sum(1)
    return torch.cat([ids[:, :start], new[:, : int(lengths.max())]], 1) if new.numel() else ids


def init_inference(
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    plan: Mapping[str, Any] | None = None,
    layouts: Any = None,
    example: Any = None,
    **kwargs: Any,
) -> InferenceEngine:
    """``deepspeed.init_inference``, on Espalier.

    Args:
        config: a dict, or the path of a JSON file; ``kwargs`` are more of its keys. ``dtype``, by default
            float16; ``tensor_parallel={"tp_size": n}``; ``checkpoint``, from which weights are read. Keys of
            kernels have no effect, as models run as they are written.
        plan: more of the plan, for which the configuration has no word.
        layouts, example: of layers, and inputs of a call, for :func:`espalier.initialize`. A model that is
            cut needs an example to read a ``checkpoint``.

    Raises:
        ValueError: listing every mistake of the configuration.
    """
    tables = {} if config is None else load(config)
    tables = {_ALIASES.get(key, key): value for key, value in {**tables, **kwargs}.items()}
    known = {"dtype", "tensor_parallel", "mp_size", "checkpoint", *_IDLE, *_REFUSED}
    wrong: list[Any] = [
        unknown_key(key, value, sorted(known)) for key, value in tables.items() if key not in known
    ]
    for key, reason in _REFUSED.items():
        if tables.get(key) not in (None, {}, 1, False) and key in tables:
            wrong.append((key, tables[key], f"not to be had here: {reason}"))
    given = tables.get("dtype", torch.float16)
    word = dtype_name(given)
    word = _WORDS.get(word, word)
    if word not in ("float32", "float16", "bfloat16", "float64"):
        wrong.append(("dtype", given, "expected torch.float16, torch.bfloat16 or torch.float32"))
    section = tables.get("tensor_parallel") or {}
    size = section.get("tp_size", 1) if section.get("enabled", True) else 1
    size = max(int(size), int(tables.get("mp_size", 1)))
    init_distributed()
    ranks = running_size()
    if ranks % size:
        wrong.append(("tensor_parallel.tp_size", size, f"expected a divisor of the {ranks} rank(s)"))
    if tables.get("checkpoint") is not None and size > 1 and example is None:
        wrong.append(("checkpoint", tables["checkpoint"], "a model that is cut needs example=inputs, too"))
    if wrong:
        raise MistakeError(_OWNER, wrong)
    axes = {"data": ranks // size, "tensor": size}
    module = model.to(getattr(torch, word))
    engine = initialize(module, None, {**axes, **(plan or {})}, layouts=layouts, example=example)
    if tables.get("checkpoint") is not None:
        engine.load_weights(tables["checkpoint"])
    return InferenceEngine(engine)


__all__ = ["InferenceEngine", "init_inference"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.inference",
    {
        "v2": "deepspeed.init_inference(model, tensor_parallel={'tp_size': n}) answers: "
        "engine.generate(input_ids, max_new_tokens=n)",
        "quantization": "weights are not quantised: dtype= of init_inference casts them",
        "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig "
        "InferenceCheckpointConfig ActivationQuantConfig BaseQuantConfig DtypeEnum MoETypeEnum "
        "QKVQuantConfig QuantTypeEnum WeightQuantConfig": (
            "deepspeed.init_inference(model, config={...}) takes a dict"
        ),
    },
    elsewhere={"config engine": __name__},
)
