"""``deepspeed.sequence``: attention whose heads are cut over the ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from espalier.compat.absent import or_absent
from espalier.layout import Shard
from espalier.mesh import Mesh
from espalier.tensor import DTensor


class DistributedAttention(nn.Module):
    """As ``deepspeed.sequence.layer.DistributedAttention``: sequences come together, and heads apart, around
    an attention that is written for whole sequences.

    In a model that ``deepspeed.initialize`` lays out with ``sequence_parallel_size``, tensors are global, and
    the attention itself is spread over the ranks: the module calls it as it is.

    Args:
        local_attention: of queries, keys and values.
        sequence_process_group: the ranks that share a sequence.
        scatter_idx: the dim of heads.
        gather_idx: the dim of the sequence.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The attention's output, of this rank's part of the sequence as the queries are."""
        if rotary_pos_emb is not None:
            raise ValueError(
                "DistributedAttention(rotary_pos_emb=...): turn queries and keys before they come here."
            )
        if isinstance(query, DTensor) or dist.get_world_size(self.spg) == 1:
            return self.local_attn(query, key, value, *args, **kwargs)
        ranks = dist.get_process_group_ranks(self.spg)
        mesh = Mesh.from_env({"sequence": len(ranks)}, query.device.type, ranks=ranks)

        def turned(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
            cut = DTensor.from_local(x, mesh, [Shard(before)])
            return cut.redistribute(placements=[Shard(after)]).to_local()

        heads = [turned(x, self.gather_idx, self.scatter_idx) for x in (query, key, value)]
        return turned(self.local_attn(*heads, *args, **kwargs), self.scatter_idx, self.gather_idx)


__all__ = ["DistributedAttention"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.sequence",
    {
        "auto_sp autosp_detector autosp_fusion autosp_vit fpdt_layer": (
            "say sequence_parallel_size in the configuration: the model's own attention is cut"
        ),
        "cross_entropy linear_cross_entropy vocab_parallel_ops": (
            "call torch.nn.functional.cross_entropy: it takes logits that are cut over ranks"
        ),
        "single_all_to_all pre_all2all_fun post_all2all uneven_heads_all2all register_all_to_all_group": (
            "DTensor.redistribute() turns a cut of the sequence into one of heads"
        ),
        "apply_rotary_pos_emb": "turn queries and keys before they come to the attention",
    },
    elsewhere={"layer": __name__},
)
