"""``deepspeed.moe`` has no equivalent: whoever imports it reads what to write instead."""

raise ImportError(
    "deepspeed.moe has no equivalent here: experts are found in the plain model, whose layers need no "
    "process groups. Write espalier.models.moe.MoELayer, or a layer whose stack of experts is called as "
    'experts(hidden, top_k_index, top_k_weights), and deepspeed.initialize(..., plan={"expert": n}): see '
    "docs/experts.md.",
    name="deepspeed.moe",
)
