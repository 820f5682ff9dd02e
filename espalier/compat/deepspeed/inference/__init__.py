"""``deepspeed.inference``: a model that answers."""

from espalier.compat.deepspeed.inference.engine import InferenceEngine, init_inference

__all__ = ["InferenceEngine", "init_inference"]
