"""``colossalai.kernel``: torch's layers; engine.compile() fuses what stands in blocks."""

from torch.nn import LayerNorm

from espalier.compat.absent import or_absent

FusedLayerNorm = LayerNorm

__all__ = ["FusedLayerNorm", "LayerNorm"]

__getattr__ = or_absent(
    __name__,
    "colossalai.kernel",
    {
        "jit triton": "models run as they are written: engine.compile() compiles their blocks",
        "extensions kernel_loader op_builder": "nothing is compiled at installation: torch chooses kernels",
        "MultiHeadAttention": "torch.nn.MultiheadAttention is cut by the plan",
        "FusedScaleMaskSoftmax": "torch.nn.functional.scaled_dot_product_attention chooses its kernel",
        "AttnMaskType": "torch.nn.functional.scaled_dot_product_attention takes is_causal, or a mask",
    },
    elsewhere={"cuda_native layer_norm multihead_attention scaled_softmax": __name__},
)
