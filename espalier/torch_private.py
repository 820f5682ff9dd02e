"""Every private name of torch that is used here, under our own; nowhere else in the package stands one.

All were seen in torch 2.11 to 2.13. Where one is gone, the import of this file says so by name; those that
can be done without are None then, and whoever uses them has another way. Another version of torch is tried
here first, then by the tests (``make lint test TORCH=2.11.0``). Not here: private attributes of objects (a
module's ``_parameters``, an optimizer's hooks), and operators of ``torch.ops``. ``tools/private.py``, which
``make lint`` runs, finds any other.
"""

# ruff: noqa: F401

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.optim import optimizer as optimizers

try:
    # ---- torch functions: on, off, and the modes that see them
    from torch._C import DisableTorchFunction as without_torch_functions  # of all classes and modes
    from torch._C import DisableTorchFunctionSubclass as raw  # of DTensor: calls go to the local tensors
    from torch._C import _current_graph_task_id as current_graph_task_id  # -1 outside a backward pass
    from torch._C import _disabled_torch_function_impl as plain_call  # one call past torch functions
    from torch._C import _EnableTorchFunction as with_torch_functions
    from torch._C import _is_torch_function_enabled as torch_functions_on
    from torch._C import _len_torch_dispatch_stack as dispatch_modes  # how many are open
    from torch._C import _len_torch_function_stack as function_modes
    from torch._C import _set_grad_enabled as set_grad_enabled  # what torch.no_grad calls when it is recorded
    from torch._C import _will_engine_execute_node as will_run  # whether a backward pass comes by a node

    # ---- autograd
    from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph  # of a backward pass
    from torch._C._autograd import _saved_tensors_hooks_set_tracing as let_traces_pass_saving_hooks  # was so
    from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks  # the innermost

    # ---- transforms of functions
    from torch._C._functorch import peek_interpreter_stack as open_transform  # None: none is open
    from torch._functorch import apis as functorch_apis
    from torch._functorch import eager_transforms as functorch_transforms
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
    from torch._higher_order_ops.flex_attention import math_attention  # flex_attention, without compilation
    from torch._ops import OpOverload, OpOverloadPacket

    # ---- tensors without data
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.nn.attention.flex_attention import (
        _LARGE_SPARSE_BLOCK_SIZE as UNBOUNDED_BLOCK,  # of flex_attention
    )
    from torch.nn.attention.flex_attention import _identity as same_score
    from torch.nn.modules import _functions as module_functions  # autograd functions of torch.nn's modules
    from torch.nn.modules.dropout import _DropoutNd as AnyDropout
    from torch.overrides import _get_current_function_mode_stack as function_mode_stack
    from torch.utils import _pytree as pytree
    from torch.utils._device import DeviceContext as DefaultDevice  # the mode of torch.set_default_device
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack

    # ---- pickles of tensors
    dtypes_of_storages = torch.storage._dtype_to_storage_type_map
    rebuild_tensor = torch._utils._rebuild_tensor_v2
    rebuild_tensor_of_dtype = torch._utils._rebuild_tensor_v3

    # ---- calls on lists of tensors, which optimizers make too
    foreach_copy_ = torch._foreach_copy_
    foreach_mul_ = torch._foreach_mul_
    foreach_norms = torch._foreach_norm
    foreach_zero_ = torch._foreach_zero_
    fused_devices = torch.utils._foreach_utils._get_fused_kernels_supported_devices  # for optimizers
    check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_  # GradScaler's

    # ---- functions that public ones end in
    module_call = torch.nn.Module._call_impl
    lazy_clone = torch._lazy_clone
    forward_dual = torch._VF._make_dual
    nn_built_in: Any = torch._C._nn
    neg_view = torch._neg_view
    dual_parts = torch._VF._unpack_dual
    fused_weight_norm = torch._weight_norm

    _of_tensors = torch._C.TensorBase  # what torch.Tensor has from C
    BUILT_IN = (  # where C puts functions of torch
        nn_built_in,
        getattr(torch._C, "_special"),  # noqa: B009 (unknown to the stubs)
        getattr(torch._C, "_linalg"),  # noqa: B009
        torch._C._VariableFunctions,
    )
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"torch {torch.__version__} lacks a private name that Espalier rests on ({missing}). It was tried "
        "with torch 2.11 to 2.13: install one of these, or tell us."
    ) from missing

# where torch's dispatch modes stand that only look on
ONLOOKERS = frozenset({"torch.utils.flop_counter", "torch.distributed._tools.mem_tracker"})

# ---- what can be done without

_dispatching = importlib.import_module("torch.utils._python_dispatch")
disable_modes: Any = getattr(_dispatching, "_disable_current_modes", nullcontext)
mesh_resources: Any = getattr(torch.distributed.device_mesh, "_mesh_resources", None)  # the open meshes
scaled_mm: Any = getattr(torch, "_scaled_mm", None)  # products of 8-bit floats
swap_impls: Any = getattr(torch._C, "_swap_tensor_impl", None)  # of two tensors; who holds one holds it still
use_count: Any = getattr(torch.Tensor, "_use_count", None)  # 1: Python alone holds it, and no graph does
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)


def _memory_uses(x: torch.Tensor) -> int:
    uses: int = _storage_uses(x.untyped_storage()._cdata)
    return uses


memory_uses = None if _storage_uses is None else _memory_uses  # how many tensors, and Python, hold its memory


def takes_tangents() -> bool:
    """Whether forward-mode derivatives are taken."""
    return forward_ad._current_level >= 0


def has_hooks_of_all_steps() -> bool:
    """Whether hooks run around the step of any optimizer."""
    return bool(optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)


def base_of(x: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of."""
    return x._base


def detached_here(x: torch.Tensor) -> torch.Tensor:
    """``x.detach()`` in a dispatch mode: its version counts what is written to ``x``, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


_settings: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
_set_settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)


def allocator_settings() -> str | None:
    """What ``PYTORCH_ALLOC_CONF`` or the program said to allocators of memory; None: it cannot be asked.

    From torch 2.13 on, which alone knows ``pinned_max_round_threshold_mb``.
    """
    known = _settings is not None and _set_settings is not None and _version() >= (2, 13)
    return str(_settings()) if known else None


def set_allocator_settings(settings: str) -> None:
    """Say something else."""
    _set_settings(settings)


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def go_at_once(x: torch.Tensor) -> None:
    """Let a backward pass do what made a tensor as soon as it can, as it does the end at a parameter."""
    move: Any = getattr(x.grad_fn, "_set_sequence_nr", None)
    if move is not None:
        move(2**64 - 1)


def getter(name: str) -> Callable[[torch.Tensor], Any]:
    """An attribute of tensors, read by C alone: to be called where torch functions are not intercepted."""
    read: Callable[[torch.Tensor], Any] = vars(_of_tensors)[name].__get__
    return read


def setter(name: str) -> Callable[[torch.Tensor, Any], None]:
    """The same, written."""
    write: Callable[[torch.Tensor, Any], None] = vars(_of_tensors)[name].__set__
    return write


def method(name: str) -> Callable[..., Any]:
    """A method of tensors, of C alone."""
    call: Callable[..., Any] = getattr(_of_tensors, name)
    return call


def tensor_attributes() -> dict[str, Any]:
    """All that tensors have from C, by name."""
    return dict(vars(_of_tensors))


def set_group_timeout(timeout: timedelta) -> None:
    """How long collectives of the running world may wait from now on."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout)


def forget_failed_world() -> None:
    """Let the next world have the first one's name on all ranks, also where a try to join one has failed."""
    torch.distributed.distributed_c10d._world.group_count = 0


def default_store() -> Any:
    """The store by which the ranks of the running world have met."""
    return torch.distributed.distributed_c10d._get_default_store()


class DispatchMode(TorchDispatchMode):
    """A mode for runs without data, in which nothing is compiled.

    From others torch keeps its compiler out, call by call; that takes as long as what a dry run does in one.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _AtTheEnd:
    """Is let go of when a world is given up."""


def when_world_ends(call: Callable[[], None]) -> None:
    """Call when the running world's process groups are destroyed."""
    token = _AtTheEnd()
    weakref.finalize(token, call)
    # torch empties this with the world; who is in it is asked for by process groups alone
    torch.distributed.distributed_c10d._world.pg_coalesce_state[token] = []  # type: ignore[index]


def after_backward(callback: Callable[[], None]) -> None:
    """Call at the end of the backward pass that is under way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- functions of torch that are wrapped: those that don't ask ``__torch_function__``

DOORS = {
    "conversion": "torch.nn:Module._apply",  # what becomes of a module's parameters
    "backward hooks": "torch.utils.hooks:BackwardHook._apply_on_tensors",
    "recomputation": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "vmap": "torch._functorch.vmap:_add_batch_dim",
    "grad": "torch._functorch.eager_transforms:_wrap_for_grad",
    "functionalize": "torch._functorch.eager_transforms:_wrap_all_tensors_to_functional",
    "functional": "torch.nn.functional:handle_torch_function",
    "norm": "torch.nn.utils.clip_grad:_get_total_norm",
    "clipping": "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
    "grouping": "torch.nn.utils.clip_grad:_group_tensors_by_device_and_dtype",
    # by the names that programs use
    "named norm": "torch.nn.utils:get_total_norm",
    "named clipping": "torch.nn.utils:clip_grads_with_norm_",
    # torch's helpers for state dicts
    "walk": "torch.distributed._state_dict_utils:_iterate_state_dict",
    "broadcast": "torch.distributed._state_dict_utils:_broadcast_tensors",
    "broadcast dict": "torch.distributed.checkpoint.state_dict:_broadcast_state_dict",
    "distribute dict": "torch.distributed.checkpoint.state_dict:_distribute_state_dict",
    "plan": "torch.distributed.checkpoint.planner_helpers:_iterate_state_dict",
    "stage": "torch.distributed.checkpoint._state_dict_stager:StateDictStager._offload_tensor",
}


def converts_itself(module: torch.nn.Module) -> bool:
    """Whether ``module.to(...)`` reaches more than parameters and buffers: states of metrics, say."""
    return type(module)._apply is not torch.nn.Module._apply


def wrap_door(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Put ``wrapper(function)`` in the place of one of ``DOORS``, once; nothing where torch lacks it."""
    module, _, path = DOORS[name].partition(":")
    *owners, last = path.split(".")
    place: Any = importlib.import_module(module)
    for owner in owners:
        place = getattr(place, owner)
    original = getattr(place, last, None)
    if original is not None and not hasattr(original, "_espalier"):
        wrapped = wrapper(original)
        wrapped._espalier = True
        setattr(place, last, wrapped)


determinism_checks: dict[str, Any] = getattr(torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", {})
noop_save_inputs: Any = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)  # of torch before 2.13
next_node_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)

# ---- what torch.compile leaves alone

_FRAMES: Any = torch._C._dynamo.eval_frame
_LEAVE: Any = _FRAMES._FrameExecStrategy(_FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.SKIP)


def as_written(function: Any) -> Any:
    """Let ``torch.compile`` leave a function, and all that it calls, as ``torch.compiler.disable`` would.

    That imports the compiler, which takes seconds.
    """
    _FRAMES.set_code_exec_strategy(function.__code__, _LEAVE)
    function._torchdynamo_disable = True
    return function


def let_calls_be_written(
    is_so: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], bool],
) -> None:
    """Let calls of what ``torch.compile`` gave run uncompiled where this says so.

    It is asked of ``(function, args, kwargs)``. The compiler is not imported for that, which takes seconds,
    but followed as soon as it is.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        if not hasattr(torch.compile, "_espalier"):
            setattr(torch, "compile", _following(torch.compile, is_so))  # noqa: B010 (it is overloaded)
        return
    chosen: Any = getattr(compiler, "_callback_from_stance", None)  # who compiles, if anyone does
    if chosen is None:
        torch.compiler.set_stance("force_eager")
        return
    if hasattr(chosen, "_espalier"):
        return
    counted: Any = getattr(_FRAMES, "set_fullgraph_compiled_frame_count", None)

    def compiles(callback: Any) -> Any:
        if callback not in (None, False):
            call = sys._getframe(1).f_locals
            if "fn" in call and is_so(call["fn"], call.get("args", ()), call.get("kwargs", {})):
                if call.get("fullgraph_count_enabled") and counted is not None:
                    counted(-1)  # compiled frames are not counted: else none is an error
                return None
        return chosen(callback)

    compiles._espalier = True  # type: ignore[attr-defined]
    compiler._callback_from_stance = compiles


def _following(compile: Any, is_so: Any) -> Any:
    @functools.wraps(compile)
    def first(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._dynamo.eval_frame")
        setattr(torch, "compile", compile)  # noqa: B010
        let_calls_be_written(is_so)
        return compile(*args, **kwargs)

    first._espalier = True  # type: ignore[attr-defined]
    return first


# ---- what is seldom needed, and slow to import


def compiler(name: str) -> Any:
    """torch.compile's backend of that name."""
    from torch._dynamo import lookup_backend

    return lookup_backend(name)


def inductor(
    mode: str | None, options: dict[str, Any] | None, rewrite: Callable[[torch.fx.Graph], None] | None
) -> Any:
    """Inductor, with torch.compile's ``mode`` and ``options``, and its graphs rewritten.

    A rewriting may hang on what other ranks say, so what was compiled with one is not kept on disk.
    """
    if rewrite is None:
        return torch._TorchCompileInductorWrapper(mode, options, False)
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Rewriting(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            assert rewrite is not None
            rewrite(graph)

        def uuid(self) -> None:
            return None

    asked = {"post_grad_custom_pre_pass": Rewriting(), **(options or {})}
    return torch._TorchCompileInductorWrapper(mode, asked, False)


def aot_eager(rewrite: Callable[[torch.fx.Graph], None]) -> Any:
    """torch.compile's backend of that name, with its graphs, forward and backward, rewritten."""
    from torch._dynamo.backends.debugging import boxed_nop

    whole = compiler("aot_eager")

    def compile(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module.graph)
        module.recompile()
        return boxed_nop(module, inputs)

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return whole(module, inputs, fw_compiler=compile, bw_compiler=compile)

    return backend


def traced_graph() -> torch.fx.Graph | None:
    """The graph of ATen's operators that is being written by a tracer, if any is."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    graph: torch.fx.Graph | None = None if mode is None else mode.tracer.graph
    return graph


def with_effects() -> Any:
    """What a traced graph calls, ``(token, operator, *args)``, where an operator's effects are ordered."""
    return torch.ops.higher_order.with_effects


def storage_info(file: str, start: int, size: int) -> Any:
    """Where torch's checkpoints say that a tensor stands."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, size)


def keep_order(operator: Any) -> None:
    """A compiled graph runs calls of an operator in the order in which they were traced."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(operator, _EffectType.ORDERED)


def dtensor_spec(mesh: Any, placements: Any, shape: torch.Size, stride: Any, dtype: torch.dtype) -> Any:
    """torch's own description of a DTensor."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


# ---- autocast of tensors without data: a key of the dispatcher that nothing else uses

AUTOCAST_KEY: Any = getattr(torch._C.DispatchKey, "AutocastIPU", None)
BELOW_AUTOCAST: Any = None if AUTOCAST_KEY is None else torch._C._dispatch_keyset_full_after(AUTOCAST_KEY)


def with_autocast_key() -> Any:
    """While open, calls come by the key."""
    return torch._C._IncludeDispatchKeyGuard(AUTOCAST_KEY)


def past_autocast_key() -> Any:
    """While open, they don't."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST_KEY))


def autocast_operators() -> list[str]:
    """The operators that autocast knows on CPUs, as ``aten::name.overload``."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"))
