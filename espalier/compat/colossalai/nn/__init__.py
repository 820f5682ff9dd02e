"""``colossalai.nn``: torch's layers, which the plan cuts; its optimizers; schedules by step; a metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from espalier.compat.absent import Absent, or_absent
from espalier.compat.colossalai.nn import lr_scheduler, optimizer


def _of_torch(name: str) -> Any:
    for home in (lr_scheduler, optimizer):
        found = getattr(home, name, None)
        if name in home.__all__ or isinstance(found, Absent):
            return found
    return getattr(nn, name)


_WHOLE = "torch.nn's layers are cut by the plan: write the model for one device"
_SUFFIXES = ("1D", "2D", "2p5D", "3D")


class Accuracy(nn.Module):
    """How many of the highest logits are the labels."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Their number."""
        return (logits.argmax(-1) == targets).sum()


__all__ = ["Accuracy", "lr_scheduler", "optimizer"]

__getattr__ = or_absent(
    __name__,
    "colossalai.nn",
    {
        "init": "torch.nn.init fills parameters; values are those of the model on one device",
        "Classifier VanillaClassifier VanillaLinear": "torch.nn.Linear is cut by the plan",
        "PatchEmbedding VanillaPatchEmbedding": "torch.nn.Conv2d is cut by the plan",
        "VanillaLayerNorm FusedLayerNorm": "torch.nn.LayerNorm is cut by the plan",
        "DropPath WrappedDropout WrappedDropPath": "torch.nn.Dropout draws the same, whatever its layout",
        " ".join(
            f"{name}{suffix}"
            for suffix in _SUFFIXES
            for name in (
                "Linear LayerNorm Embedding Dropout Classifier PatchEmbedding VocabParallelClassifier "
                "VocabParallelEmbedding VocabParallelCrossEntropyLoss CrossEntropyLoss Accuracy"
            ).split()
        ): _WHOLE,
        "Linear1D_Col Linear1D_Row ParallelLayer ColoModule ColoLinear ColoEmbedding": _WHOLE,
        "TransformerSelfAttentionRing RingAV RingQK": "Plan(context=n) cuts sequences of plain attention",
        "PipelineSharedModuleWrapper": "parameters that stages share are found in the model",
        "partition_batch split_batch_2d split_batch_2p5d split_batch_3d split_tensor_3d reduce_by_batch_2d "
        "reduce_by_batch_2p5d reduce_by_batch_3d": "the plan cuts batches: give the model whole rows",
        "CheckpointModule": "Plan(recompute='full') computes blocks again",
        "ACT2FN divide to_2tuple get_tensor_parallel_mode set_tensor_parallel_attribute_by_size "
        "set_tensor_parallel_attribute_by_partition": _WHOLE,
        "colo_addmm colo_batch_norm colo_cross_entropy colo_embedding colo_embedding_bag colo_layernorm "
        "colo_linear colo_view convert_to_colo_tensor register_elementwise_op GeneralTensor": (
            "torch's functions work on espalier.DTensor; espalier.register_rule has rules of your own"
        ),
        "kaiming_normal_ kaiming_uniform_ lecun_normal_ lecun_uniform_ normal_ ones_ trunc_normal_ uniform_ "
        "xavier_normal_ xavier_uniform_ zeros_": "torch.nn.init has it",
        "MoeCrossEntropyLoss MoeRouter MoeLayer MoeModule MoeLoss Experts FFNExperts TPExperts Top1Router "
        "Top2Router NormalNoiseGenerator UniformNoiseGenerator build_ffn_experts load_moe_model "
        "save_moe_model": ("Plan(expert=n) finds experts in the model, as transformers writes them"),
        "CachedEmbeddingBag CachedParamMgr ParallelCachedEmbeddingBag": (
            "torch.nn.EmbeddingBag is cut by the plan: layouts={'pattern': 'vocab'}"
        ),
        "ColoDDP": "Booster with TorchDDPPlugin shares the batch",
        "GeminiDDP ZeroDDP zero_model_wrapper zero_optim_wrapper": "colossalai.zero has it",
        "parallel_1d parallel_2d parallel_2p5d parallel_3d vanilla": _WHOLE,
        "layernorm": "torch.nn.LayerNorm is cut by the plan",
        "moe": "Plan(expert=n) finds experts in the model, as transformers writes them",
        "parallel_sequence": "Plan(context=n) cuts sequences of plain attention",
        "scaled_softmax": "torch's scaled_dot_product_attention is cut by the plan",
        "wrapper": "parameters that stages share are found in the model",
        "Accuracy2D Accuracy2p5D Accuracy3D calc_acc": "Accuracy counts whole rows under any plan",
    },
    _of_torch,
    elsewhere={
        "layer base_layer colossalai_layer common dropout embedding linear normalization utils loss metric "
        "accuracy_2d accuracy_2p5d accuracy_3d": __name__,
        "parallel": "espalier.compat.colossalai.zero",
    },
)
