"""``deepspeed.runtime``: what programs take from there."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.runtime import (
    activation_checkpointing,
    config,
    dataloader,
    engine,
    lr_schedules,
    pipe,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime",
    {
        "fp16 bf16_optimizer base_optimizer": "engine.optimizer, torch's own, has cur_scale and overflow",
        "compiler": "engine.compile() compiles the model's blocks",
        "data_pipeline": "choose data and sequence lengths in the data set",
        "hybrid_engine hybrid_engine_graph rollout": "engine.engine.generate(ids, n) writes text under "
        "any plan",
        "tensor_parallel domino": "say tensor_parallel.autotp_size in the configuration",
        "sequence_parallel": "say sequence_parallel_size in the configuration",
        "swap_tensor superoffload zenflow": "`offload_optimizer` and `offload_param` of the configuration",
        "checkpoint_engine model_checkpointing state_dict_factory": "engine.save_checkpoint, load_checkpoint",
        "weight_quantizer quantize": "weights are not quantised",
        "chunked_cross_entropy": "call torch.nn.functional.cross_entropy",
        "comm": "gradients are summed by backward() and step()",
        "eigenvalue progressive_layer_drop sparse_tensor": "DeepSpeed has dropped it, or its use: leave "
        "it out",
        "keep_in_fp32 precision_config torch_autocast": "Plan(precision=), or fp16, bf16, torch_autocast "
        "of the "
        "configuration, say the dtypes",
        "python_gc": "engine.collect_python_gc()",
        "config_utils": "deepspeed.initialize(config=) takes a dict",
        "constants": "the configuration's keys are words: see docs/deepspeed.md",
    },
)
