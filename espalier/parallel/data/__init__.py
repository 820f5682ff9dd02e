"""The data axis: DDP, ZeRO and FSDP as one mechanism, chunks of parameters, gradients and states."""
