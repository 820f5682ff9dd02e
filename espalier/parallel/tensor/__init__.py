"""Tensor parallelism: which dim of which parameter the tensor axis cuts. 1D (Shoeybi et al. 2019)."""
