"""A small GPT of Megatron-core on gloo ranks: trained, saved by Megatron itself, and loaded by it.

Called as ``python megatron_program.py FOLDER KIND RANKS ACTION``; prints nothing. Megatron asks for CUDA in
a few places although it computes on CPUs: there is nothing to wait for, and no other random stream; and its
distributed optimizer takes float32 on a GPU, for which float64 on a CPU passes here. Ranks share tensors, but
those of ``mixtral``: they have other experts, and half of each optimizer state; ``glm4_moe`` is trained by
Megatron-FSDP, whose streams are none here.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

WORDS, PADDED = 60, 64
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 20}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_func": F.gelu},
    "llama": {
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
    },
}
KINDS["mixtral"] = {
    **KINDS["llama"],
    **EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
KINDS["glm4_moe"] = {
    **KINDS["mixtral"],
    "qk_layernorm": True,
    "moe_layer_freq": [0, 1],
    "moe_shared_expert_intermediate_size": EXPERTS["moe_ffn_hidden_size"],
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
}
FORMS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")  # the first is exact in float64


class OnCPU(TorchFunctionMode):
    """What is made on a GPU is made on the CPU, and tensors say that they are such as Megatron takes: float64
    stays what it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1:
            return "torch.cuda.FloatTensor"
        if func is torch.Tensor.cuda or (func is torch.Tensor.float and args[0].dtype is torch.float64):
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and what comes next."""
    ids = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1], ids[:, 1:]


def built(kind: str, ranks: int) -> Any:
    """The model in float64."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # which is not defined without Transformer Engine, and asked for
    random.get_cuda_rng_tracker().fork = lambda *name: contextlib.nullcontext()
    shared = {"tensor_model_parallel_size": 1 if kind in ("mixtral", "glm4_moe") else ranks}
    shared |= (
        {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1} if kind == "mixtral" else {}
    )
    parallel_state.initialize_model_parallel(**shared)
    config = TransformerConfig(
        **SHAPE,
        **KINDS[kind],
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        **shared,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    torch.manual_seed(1)
    spec: Any = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    mixed = [spec] if kind == "mixtral" else []
    if kind == "glm4_moe":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        mixed = spec.layer_specs[1:]
    for each in mixed:  # the names that layers of Transformer Engine have
        each.submodules.sharded_state_dict_keys_map = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
        }
    return GPTModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=16,
        parallel_output=False,
        position_embedding_type="learned_absolute" if kind == "gpt2" else "rope",
        rotary_percent=0.5 if kind == "glm4_moe" else 1.0,
        share_embeddings_and_output_weights=kind == "gpt2",
    ).double()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Megatron's groups: matrices decay, biases and norms do not."""
    held: list[list[torch.Tensor]] = [[], []]
    for name, p in model.named_parameters():
        held[p.ndim > 1 and not name.endswith(".bias")].append(p)
    told = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    groups = [
        {"params": held[1], "weight_decay": 0.1, "wd_mult": 1.0, **told},
        {"params": held[0], "weight_decay": 0.0, "wd_mult": 0.0, **told},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


class Summed:
    """A model of Megatron's that sums its gradients, and its optimizer."""

    model: Any
    optimizer: Any

    def step(self) -> None:
        """Sum, and update."""
        self.model.finish_grad_sync()
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Also what has been summed."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()


class Distributed(Summed):
    """Megatron's distributed optimizer, around a model whose gradients it sums in buckets."""

    def __init__(self, model: Any) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(model.config, config, model)
        options = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": True}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", **options), [self.model])
        for group in self.optimizer.param_groups:  # as Megatron's schedule does at each step
            group["weight_decay"] *= group["wd_mult"]

    def sharded(self, form: str) -> Any:
        """Its states."""
        return self.optimizer.sharded_state_dict(
            self.model.module.sharded_state_dict(), metadata={"distrib_optim_sharding_type": form}
        )


class Stream:
    """What stands for a stream and an event of a GPU, where all is done in its order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def record_event(self, *args: Any) -> Stream:
        return Stream()


class FullySharded(Summed):
    """Megatron-FSDP around a model in bfloat16, with its weights in float32, and its optimizer."""

    def __init__(self, model: Any) -> None:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from torch.distributed import DeviceMesh

        torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[misc,assignment]
        torch.cuda.current_stream = Stream  # type: ignore[assignment]
        torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc]
        torch.cuda.current_device = lambda: 0  # type: ignore[method-assign]
        of_groups = DeviceMesh.from_group

        def on_host(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
            return of_groups(group, "cpu", *args, **kwargs)

        DeviceMesh.from_group = staticmethod(on_host)  # type: ignore[method-assign,assignment]
        model.config.bf16, model.config.params_dtype = True, torch.bfloat16
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy="optim_grads_params",
            gradient_reduce_div_fusion=False,  # a reduction of NCCL's
        )
        half = Float16Module(model.config, model.to(torch.float32))
        self.model = FullyShardedDataParallel(model.config, config, half, device=torch.device("cpu"))
        options = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": True}
        whole = OptimizerConfig(optimizer="adam", bf16=True, **options)
        self.optimizer = get_megatron_optimizer(whole, [self.model])
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[method-assign,assignment,return-value]

    def save(self, folder: str) -> dict[str, torch.Tensor]:
        """As Megatron's training does; gives weights and states, whole, by Megatron's names.

        torch's Adam has no states of a parameter of which a rank holds nothing, and others first in line on
        other ranks: Megatron asks all ranks for each in turn, so they are put in order.
        """
        import torch.distributed.checkpoint as dcp
        from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
        from megatron.core.transformer import fsdp_dtensor_checkpoint as form

        for each in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            held = each.optimizer
            for p in (p for group in held.param_groups for p in group["params"]):
                none = {"step": torch.tensor(2.0), "exp_avg": torch.zeros_like(p)}
                none["exp_avg_sq"] = torch.zeros_like(p)
                held.state[p] = held.state.pop(p, none)
        state: dict[str, Any] = {"args": object(), "checkpoint_version": 3.0, "iteration": 2}
        model = state["model"] = self.model.state_dict_for_save_checkpoint()
        told = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        states = state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=told)
        form.handle_fp8_extra_state_case(model)
        whole = {f"model.{name.removeprefix('module.')}": x for name, x in model.items()}
        for name, of in states["state"].items():
            short = name.replace("module.", "")
            whole |= {f"{kind}.{short}": x for kind, x in of.items() if kind != "step"}
        for name, x in whole.items():
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, x.to_local().clone() if hasattr(x, "to_local") else None)
            whole[name] = x.clone() if parts[0] is None else torch.cat(parts)
        swiglu = form.handle_swiglu_in_state_dict(self.model.module, model, states)
        state["model"], state["optimizer"] = swiglu
        state["model"] = form.handle_experts_in_state_dict(state["model"], EXPERTS["num_moe_experts"])
        uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
        return whole


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the words that there are."""
    n = ids.shape[1]
    mask = torch.ones(1, 1, n, n).triu(1).bool()
    out: torch.Tensor = model(ids, torch.arange(n).expand_as(ids), mask)
    return out[..., :WORDS]


def train(model: Any, optimizer: torch.optim.Optimizer | Distributed | FullySharded, steps: range) -> None:
    """Steps on all rows."""
    for number in steps:
        ids, labels = batch(number)
        F.cross_entropy(logits_of(model, ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tree(
    model: Any, optimizer: torch.optim.Optimizer | Distributed | None, form: str = FORMS[0]
) -> dict[str, Any]:
    """What Megatron makes of it: of a plain optimizer, what its FP32Optimizer does."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )

    found: dict[str, Any] = {"model": model.sharded_state_dict()}
    if isinstance(optimizer, Distributed):
        found["optimizer"] = optimizer.sharded(form)
    elif optimizer is not None:
        state = optimizer.state_dict()
        held = (p for group in optimizer.param_groups for p in group["params"])
        sharded = get_param_id_to_sharded_param_map(model.sharded_state_dict(), held)
        step = next(iter(state["state"].values()))["step"]
        optim_state_to_sharding_state(state, sharded, exclude_keys="step")
        state["state"]["common_step"] = step
        found["optimizer"] = state
    return found


def load(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """What Megatron does with what it loads."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(tree(model, optimizer), folder)
    model.load_state_dict(loaded["model"])
    state = loaded["optimizer"]
    step = torch.as_tensor(state["state"].pop("common_step"), dtype=torch.float32)
    for each in state["state"].values():
        each["step"] = step.clone()
    optimizer.load_state_dict(state)


def main(rank: int, folder: str, kind: str, ranks: int, action: str) -> None:
    """Train and save, twice; or load what stands in ``ours``, train, and save."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[method-assign,assignment,return-value]
    dist.init_process_group("gloo", f"file://{folder}/{action}.store", rank=rank, world_size=ranks)
    from megatron.core import dist_checkpointing

    def save(name: str, more: dict[str, Any]) -> None:
        if rank == 0:
            os.makedirs(f"{folder}/{name}")
        dist.barrier()
        common = {"args": argparse.Namespace(bf16=True), "iteration": 2, "checkpoint_version": 3.0}
        dist_checkpointing.save({**more, **common}, f"{folder}/{name}")

    import argparse

    OnCPU().__enter__()
    model = built(kind, ranks)
    if action == "fsdp":
        for layer in model.decoder.layers[1:]:
            layer.mlp.router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
        save("theirs", {"model": model.sharded_state_dict()})
        with torch.no_grad():
            logits = logits_of(model, batch(9)[0])
        sharded = FullySharded(model)
        train(sharded.model, sharded, range(2))
        whole = sharded.save(f"{folder}/iter_0000002")
        if rank == 0:
            torch.save({"logits": logits, "whole": whole}, f"{folder}/right.pt")
    elif action == "save":
        optimizer = optimizer_of(model) if kind == "gpt2" else Distributed(model)
        train(model, optimizer, range(2))
        save("theirs", tree(model, optimizer))
        for form in FORMS[1:] if isinstance(optimizer, Distributed) else ():
            save(form, tree(model, optimizer, form))
        with torch.no_grad():
            logits = logits_of(model, batch(9)[0])
        if rank == 0:
            torch.save(logits, f"{folder}/logits.pt")
        train(model, optimizer, range(2, 5))
        save("end", tree(model, None))
        train(model, optimizer, range(5, 7))
        save("late", tree(model, None))
    else:
        optimizer = optimizer_of(model)
        load(model, optimizer_with_states(model, optimizer), f"{folder}/ours")
        train(model, optimizer, range(5, 7))
        save("again", tree(model, None))
    dist.barrier()
    dist.destroy_process_group()


def optimizer_with_states(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One that has made its states, which loading fills."""
    train(model, optimizer, range(1))
    return optimizer


if __name__ == "__main__":
    torch.multiprocessing.spawn(
        main, (sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]), nprocs=int(sys.argv[3])
    )
