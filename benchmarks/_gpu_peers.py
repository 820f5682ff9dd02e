"""Megatron-core and DeepSpeed on the GPT of ``benchmarks/gpu.py``: bfloat16, with masters of float32.

Whichever is not installed raises ``ImportError`` as it is begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

Step = Callable[[], object]
Data = dict[str, torch.Tensor]


def megatron(device: torch.device, data: Data, sizes: Mapping[str, int], rate: float) -> Step:
    """Its GPT along the data axis, with its distributed optimizer and both of its overlaps.

    Of Transformer Engine's layers where that is installed, else of its own.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
    has_engine = find_spec("transformer_engine") is not None
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        persist_layer_norm=has_engine,
        gradient_accumulation_fusion=False,
    )
    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if has_engine
        else gpt_layer_specs.get_gpt_layer_local_spec()
    )
    words, length = sizes["vocab_size"], sizes["max_positions"]
    net = GPTModel(config, spec, words, length, share_embeddings_and_output_weights=True)
    ways = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    model = DistributedDataParallel(config, ways, net.to(device, torch.bfloat16))
    options: dict[str, Any] = {"lr": rate, "clip_grad": 0.0, "bf16": True, "params_dtype": torch.bfloat16}
    options |= {"use_distributed_optimizer": True, "overlap_param_gather": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), [model])
    places = torch.arange(length, device=device).expand_as(data["input_ids"])
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)

    def step() -> None:
        model(data["input_ids"], places, hidden, labels=data["labels"]).mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        model.zero_grad_buffer()
        optimizer.zero_grad()

    return step


def deepspeed(net: nn.Module, data: Data, rate: float, *, stage: int, offload: bool = False) -> Step:
    """Its engine; ``offload``: states, and their update, are the host's."""
    import deepspeed as library

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        optimizer = DeepSpeedCPUAdam(net.parameters(), lr=rate)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate, fused=True)
    config = {
        "train_micro_batch_size_per_gpu": len(data["input_ids"]),
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    linear = torch.nn.functional.linear
    try:
        engine = library.initialize(model=net, optimizer=optimizer, config=config)[0]
        own = torch.nn.functional.linear  # stage 3 puts in one of its own, for whoever comes after it, too
    finally:
        torch.nn.functional.linear = linear

    def step() -> None:
        torch.nn.functional.linear = own
        try:
            engine.backward(engine(**data).loss)
            engine.step()
        finally:
            torch.nn.functional.linear = linear

    return step
