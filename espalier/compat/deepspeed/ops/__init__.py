"""``deepspeed.ops``: optimizers under the names of their kernels."""

from espalier.compat.deepspeed.ops import adam, lamb, lion

__all__ = ["adam", "lamb", "lion"]
