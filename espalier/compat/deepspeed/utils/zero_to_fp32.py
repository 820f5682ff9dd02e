"""``deepspeed.utils.zero_to_fp32``: the float32 weights of a checkpoint, whole, in one process.

Folders that ``engine.save_checkpoint`` wrote are read, and those that DeepSpeed wrote.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from espalier.checkpoint.sinks import export, weights_in
from espalier.checkpoint.sources import open_any
from espalier.compat.absent import or_absent


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The model's state dict.

    Args:
        checkpoint_dir: what ``save_checkpoint`` was given.
        tag: the checkpoint; by default the one that the file ``latest`` names.
        exclude_frozen_parameters: refused: a checkpoint does not tell them from others.
        lazy_mode: no effect: tensors are read.

    Raises:
        ValueError: there is no checkpoint, or frozen parameters are to be left out.
    """
    if exclude_frozen_parameters:
        raise ValueError(
            "get_fp32_state_dict_from_zero_checkpoint(exclude_frozen_parameters=True): a checkpoint holds "
            "all of a model. Take out of the state dict what is not to be there."
        )
    source = open_any(_tagged(checkpoint_dir, tag))
    read = {name: source.read(theirs) for name, theirs in weights_in(source).items()}
    return {name: x.float() if x.is_floating_point() else x for name, x in read.items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The model, on the CPU and with the weights of a checkpoint."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint into a folder: ``pytorch_model.bin``, or files of safetensors.

    Args:
        max_shard_size: no effect: a file has at most 5 GB, where there are several.
        safe_serialization: whether they are safetensors.
        checkpoint_dir, tag, exclude_frozen_parameters: see :func:`get_fp32_state_dict_from_zero_checkpoint`.
    """
    if safe_serialization and not exclude_frozen_parameters:
        export(_tagged(checkpoint_dir, tag), output_dir, dtype=torch.float32)
        return
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(output_dir) / "pytorch_model.bin")


def _tagged(checkpoint_dir: str | Path, tag: str | None) -> Path:
    folder = Path(checkpoint_dir)
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise ValueError(f"{folder} has no file 'latest': give tag=...")
        tag = latest.read_text("utf-8").strip()
    return folder / tag


__getattr__ = or_absent(
    __name__,
    "deepspeed.utils.zero_to_fp32",
    {
        "GatheredTensor atoi natural_keys convert_zero_checkpoint_to_state_dict get_checkpoint_files "
        "get_model_state_file get_model_state_files get_optim_files parse_model_states parse_optim_states "
        "to_torch_tensor zero3_partitioned_param_info zero_model_state": (
            "get_fp32_state_dict_from_zero_checkpoint(folder) reads what DeepSpeed wrote, and what is "
            "written here"
        )
    },
)
