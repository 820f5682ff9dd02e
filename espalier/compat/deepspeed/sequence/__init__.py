"""``deepspeed.sequence``: attention over sequences that ranks share."""

from espalier.compat.deepspeed.sequence import layer

__all__ = ["layer"]
