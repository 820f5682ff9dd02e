"""``deepspeed.ops``: optimizers under the names of their kernels."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

_BLOCKS = "models run as they are written: engine.compile() compiles their blocks"

__getattr__ = or_absent(
    __name__,
    "deepspeed.ops",
    {
        "transformer DeepSpeedTransformerLayer DeepSpeedTransformerConfig triton_ops compile": _BLOCKS,
        "deepspeed4science": "write flex_attention of torch in the model",
        "pin_memory": "get_accelerator().pin_memory(tensor), or tensor.pin_memory()",
        "sparse_attention": "DeepSpeed has dropped it: write flex_attention of torch in the model",
        "fp_quantizer quantizer": "weights are not quantised in training",
        "aio gds op_builder": "threads of the process read and write files; there are no kernels to build",
        "random_ltd": "choose data and sequence lengths in the data set",
    },
)
