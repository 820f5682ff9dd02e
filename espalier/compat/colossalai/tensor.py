"""``colossalai.tensor``: what programs of its releases 0.1 and 0.2 hand to models and optimizers."""

from __future__ import annotations

from espalier.compat.absent import or_absent
from espalier.mesh.process import running_rank, running_size
from espalier.texts import refuse


class ProcessGroup:
    """All ranks share the batch.

    Raises:
        MistakeError: ``tp_degree`` is not 1.
    """

    def __init__(
        self,
        rank: int | None = None,
        ranks: list[int] | None = None,
        tp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        if tp_degree not in (None, 1):
            expected = "expected 1: HybridParallelPlugin(tp_size=) of booster.plugin cuts tensors"
            refuse("ProcessGroup", [("tp_degree", tp_degree, expected)])

    def rank(self) -> int:
        """This one's number."""
        return running_rank()

    dp_local_rank = rank

    def world_size(self) -> int:
        """How many there are."""
        return running_size()

    dp_world_size = world_size

    def tp_world_size(self) -> int:
        """Ranks that share a tensor."""
        return 1

    def tp_local_rank(self) -> int:
        """This one's number among them."""
        return 0


__all__ = ["ProcessGroup"]

_CUT = "how parameters are cut is seen in the model, or said by boost(..., layouts={'pattern': 'column'})"
__getattr__ = or_absent(
    __name__,
    "colossalai.tensor",
    {
        "colo_parameter colo_tensor compute_spec const dist_spec_mgr op_wrapper tensor_spec utils": _CUT,
        "comm_spec shape_consistency": "x.redistribute(...) of an espalier.DTensor moves it",
        "d_tensor": "espalier.distribute_tensor(x, mesh, placements) lays a tensor out",
        "moe_tensor": "Plan(expert=n) finds experts in the model",
        "padded_tensor": "any size is cut, without padding",
        "param_op_hook": "torch's hooks work on parameters and modules",
        "sharding_spec": "placements of an espalier.DTensor say how it lies",
        "ColoParameter ColoTensor ColoTensorSpec ComputePattern ComputeSpec ReplicaSpec ShardSpec "
        "DistSpecManager DistPlacementPattern distspec convert_parameter named_params_with_colotensor": _CUT,
        "ColoParamOpHook ColoParamOpHookManager ParamOpHook ParamOpHookManager": (
            "torch's hooks work on parameters and modules"
        ),
        "CommSpec CollectiveCommPattern convert_dim_partition_dict merge_same_dim_mesh_list ShardingSpec "
        "DTensor": "espalier.DTensor, placements and x.redistribute(...) lay tensors out",
    },
    elsewhere={"process_group": __name__},
)
