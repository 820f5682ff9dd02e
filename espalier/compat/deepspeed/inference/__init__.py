"""``deepspeed.inference``: a model that answers."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.inference import config, engine
from espalier.compat.deepspeed.inference.engine import InferenceEngine, init_inference

__all__ = ["InferenceEngine", "config", "engine", "init_inference"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.inference",
    {
        "v2": "deepspeed.init_inference(model, tensor_parallel={'tp_size': n}) answers: "
        "engine.generate(input_ids, max_new_tokens=n)",
        "quantization": "weights are not quantised: dtype= of init_inference casts them",
    },
)
