"""Fail where the package knows a kind of device outside of ``espalier/device.py``.

Looked at is code, not docstrings and comments: names and texts that speak of a maker's devices (CUDA, NCCL,
XPU, ...), what torch has for all accelerators (``torch.accelerator``, a device's module), and what only they
have (streams, events, pinned memory).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("espalier")
HOME = PACKAGE / "device.py"
MAKERS = re.compile(r"cuda|cudnn|nccl|hccl|xccl|rocm|(?<![a-z])(xpu|npu|hip|mps)(?![a-z])", re.IGNORECASE)
# reached from torch by attributes
DEVICES = re.compile(
    r"torch\.(accelerator|get_device_module|cuda|xpu|npu|mps|version\.cuda|backends\.cuda)(\.|$)"
)
MADE = ("torch.Stream", "torch.Event")  # annotations may name them
PINNED = "pin_memory"

# file: the words that it may say, and why
ALLOWED: dict[str, dict[str, str]] = {
    "comm/collectives.py": {
        "espalier.comm.nccl": "what carries accelerators' tensors is called after the best known",
        "_NCCL": "the same",
        "Nccl": "the same",
    },
    "comm/nccl.py": {"Nccl": "the same"},
    "compat/colossalai/accelerator.py": {
        "CudaAccelerator": "a name of Colossal-AI",
        "cuda_accelerator": "the same",
    },
    "compat/colossalai/booster/plugin.py": {
        "steady_cuda_cap_ratio": "a name of Colossal-AI",
        PINNED: "the same",
    },
    "compat/colossalai/config.py": {"cudnn_": "names of Colossal-AI"},
    "compat/colossalai/engine.py": {"cudnn_": "names of Colossal-AI"},
    "compat/colossalai/kernel.py": {"cuda_native": "a name of Colossal-AI"},
    "compat/colossalai/utils.py": {
        PINNED: "a name of Colossal-AI, and of torch's DataLoader",
        "set_to_cuda": "a name of Colossal-AI",
        "activation_checkpoint ": "the same, of modules",
    },
    "compat/deepspeed/accelerator.py": {
        PINNED: "a name of DeepSpeed",
        "cuda_accelerator": "names of DeepSpeed",
    },
    "compat/deepspeed/checkpointing.py": {"CudaRNG": "a name of DeepSpeed", "cuda_": "names of DeepSpeed"},
    "compat/deepspeed/comm.py": {"torch_nccl": "a name of DeepSpeed"},
    "compat/deepspeed/inference.py": {"enable_cuda_graph": "a name of DeepSpeed"},
    "compat/deepspeed/ops.py": {PINNED: "a name of DeepSpeed"},
    "compat/deepspeed/runtime.py": {PINNED: "a name of DeepSpeed, and of torch's DataLoader"},
    "compat/deepspeed/timers.py": {"CudaEventTimer": "a name of DeepSpeed"},
    "compat/deepspeed/zero.py": {"CUDAQuantizer": "a name of DeepSpeed"},
    "engine/module.py": {PINNED: "a name of torch's DataLoader"},
    "engine/selective.py": {"_scaled_dot_product_cudnn_attention": "an operator of torch"},
    "mesh/process.py": {"NCCL.*(abort|remote error)": "words of an error that is looked for"},
    "tensor/compare.py": {"mps": "a kind without float64"},
    "tensor/deferred.py": {PINNED: "an argument of torch's factories, which is taken out"},
    "tensor/dry_runs.py": {"cudnn": "part of an operator's name"},
    "tensor/dtensor.py": {"is_cuda": "a name of torch.Tensor"},
    "tensor/loans.py": {"__cuda_array_interface__": "a name of torch.Tensor"},
    "tensor/rules/meta.py": {"__cuda_array_interface__": "a name of torch.Tensor"},
    "tensor/rules/norm.py": {"cudnn_enable": "an argument of torch.batch_norm"},
}


def said(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What a file says of devices, with its line: a name, or a text."""
    silent = {id(doc) for node in ast.walk(tree) if (doc := _docstring(node)) is not None}
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    made = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    for node in ast.walk(tree):
        words: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            words = [node.value]
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            dotted = _dotted(node)
            if DEVICES.match(dotted) or (dotted in MADE and id(node) in made):
                yield node.lineno, dotted
                continue
            words = [dotted]
        elif isinstance(node, ast.ImportFrom):
            words = [node.module or "", *(alias.name for alias in node.names)]
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in whole if DEVICES.match(name) or name in MADE)
        elif isinstance(node, ast.Import):
            words = [alias.name for alias in node.names]
        elif isinstance(node, ast.arg | ast.keyword):
            words = [node.arg or ""]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            words = [node.name]
        line = getattr(node, "lineno", 0)
        yield from ((line, word) for word in words if MAKERS.search(word) or word == PINNED)


def _dotted(node: ast.expr) -> str:
    """A name, and the attributes that are reached from it."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))


def _docstring(node: ast.AST) -> ast.Constant | None:
    """The text at the head of a module, class or function, or behind an assignment: of no effect."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value if isinstance(value, ast.Constant) else None


def main() -> int:
    """Print what there is, and what is allowed without need; 1 if there is any."""
    found, needed = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        allowed = ALLOWED.get(name, {})
        for line, word in said(ast.parse(path.read_text(encoding="utf-8"))) if path != HOME else ():
            excuse = next((key for key in allowed if key in word), None)
            needed.add((name, excuse))
            if excuse is None:
                found.append(f"{path}:{line}: {word!r} is for {HOME}, which knows devices, to say")
    for name, words in ALLOWED.items():
        found += [f"{PACKAGE / name} says {w!r} no more" for w in words if (name, w) not in needed]
    print("\n".join(found) or f"devices are known in {HOME} alone")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
