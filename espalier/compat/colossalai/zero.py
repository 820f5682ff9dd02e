"""``colossalai.zero``: names that configurations hold; chunks are cut evenly whatever they say."""

from espalier.tensor import deferred


class TensorShardStrategy:
    """Each tensor is cut: so it is here."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """Tensors are cut together: so it is here."""


ZeroInitContext = ColoInitContext = deferred

__all__ = ["BucketTensorShardStrategy", "ColoInitContext", "TensorShardStrategy", "ZeroInitContext"]
