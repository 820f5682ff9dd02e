"""Models and programs that are tried under every plan: see ``benchmarks/zoo.py``."""

from tests.zoo.vision import declared

declared()  # before transformers looks for torchvision
