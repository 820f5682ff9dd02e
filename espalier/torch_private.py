"""Every private name of torch that is used here, under our own; nowhere else in the package stands one.

All were seen run in torch 2.11 to 2.15. Where one is gone, the import of this file
says so by name; those that can be done without are None then, and whoever uses them has another way. Another
version of torch is tried here first, then by the tests (``make lint test TORCH=2.11.0``). So are private
attributes of torch's objects: an object that lacks one says so when it is asked. Not here: operators of
``torch.ops``. ``tools/private.py``, which ``make lint`` runs, finds any other.
"""

# ruff: noqa: F401

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import forward_ad
from torch.nn.functional import l1_loss
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizers

from espalier.meanwhile import having

NEWEST_TRIED = (2, 15)  # of torch, with which the tests were run

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
    from torch._C._autograd import _pop_saved_tensors_default_hooks as close_saving_hooks  # the innermost
    from torch._C._autograd import _push_saved_tensors_default_hooks as open_saving_hooks
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

    # ---- functions that only see that something holds
    asserts = (torch._assert, torch._assert_async)

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
        f"with torch 2.11 to {'.'.join(map(str, NEWEST_TRIED))}: install one of these, or tell us."
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
    uses: int = _storage_uses(memory_id(x))
    return uses


memory_uses = None if _storage_uses is None else _memory_uses  # how many tensors, and Python, hold its memory


def takes_tangents() -> bool:
    """Whether forward-mode derivatives are taken."""
    return forward_ad._current_level >= 0


def has_hooks_of_all_steps() -> bool:
    """Whether hooks run around the step of any optimizer."""
    return bool(optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)


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


LOSES_SECOND_DERIVATIVES = _version() < (2, 13)
"""Whether a compiled graph leaves terms of gradients of gradients out without a word: torch 2.11 did."""


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


# ---- private attributes of tensors and of their memory


def holders_of_memory(x: torch.Tensor) -> int:
    """How many tensors lie in the memory of one, itself among them; 2, where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return 2
    storage = x.untyped_storage()
    held: int = count(storage._cdata)
    return held - 1  # by this object of Python's, too


def memory_id(x: torch.Tensor | torch.UntypedStorage) -> int:
    """A number of the memory that a tensor lies in, which all that lie there share while one lives.

    Also where it has no address.
    """
    storage = x if isinstance(x, torch.UntypedStorage) else x.untyped_storage()
    return storage._cdata


def swapped(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Let two tensors change places, where torch lets them: not while its profiler has seen one."""
    try:
        swap_impls(x, other)
    except RuntimeError:  # "Expected no weakrefs": torch looks before it does anything
        return False
    return True


def version_of(x: torch.Tensor) -> int:
    """How often a tensor was written to; -1: it is an inference tensor, of which that is not known."""
    return -1 if x.is_inference() else x._version


read_version: Callable[[torch.Tensor], int] = getter("_version")  # the same by C alone, of none for inference


def base_of(x: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of."""
    return x._base


def is_a_view(x: torch.Tensor) -> bool:
    """Whether it is one of another tensor, in autograd's eyes."""
    return x._is_view()


def is_all_zero(x: torch.Tensor) -> bool:
    """Whether it is one of zeros that has no memory, as the gradient of ``torch.sgn`` is."""
    return x._is_zerotensor()


def sparse_values(x: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor, in its own memory, also if a place has several."""
    return x._values()


def place_in_checkpoint(x: torch.Tensor) -> int:
    """Where the values of a tensor that was loaded without them stand in its file."""
    storage: Any = x.untyped_storage()
    return int(storage._checkpoint_offset or 0)


def detached_here(x: torch.Tensor) -> torch.Tensor:
    """``x.detach()`` in a dispatch mode: its version counts what is written to ``x``, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


ALL_TRUE, ANY_TRUE = "_is_all_true", "_is_any_true"  # functions: distributions ask whether arguments fit
TYPED_STORAGE = "_typed_storage"  # a method: ``storage()`` without a warning
LEFT_OUT = "_ddp_params_and_buffers_to_ignore"  # DistributedDataParallel's first question to a module
ASIDE = ("_is_view", "_has_compatible_shallow_copy_type")  # methods that ask about memory, not about values

# ---- those of autograd's nodes, and hooks on gradients


def gradient_hooks(x: torch.Tensor) -> dict[int, Any]:
    """What is called with a tensor's gradient before it is kept."""
    return x._backward_hooks or {}


def hooks_after_gradient(x: torch.Tensor) -> dict[int, Any]:
    """What is called when a parameter's gradient has been kept."""
    hooks: dict[int, Any] | None = getattr(x, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def taken_gradient_hooks(x: torch.Tensor) -> dict[int, Any]:
    """The :func:`gradient_hooks`, which torch calls no longer; their handles go on taking them away."""
    hooks = x._backward_hooks
    if hooks is None:
        return OrderedDict()
    x._backward_hooks = OrderedDict()
    return hooks


def taken_hooks_after(x: torch.Tensor) -> dict[int, Any]:
    """The :func:`hooks_after_gradient`, which torch calls no longer; their handles go on taking them away."""
    hooks: dict[int, Any] | None = getattr(x, "_post_accumulate_grad_hooks", None)
    if hooks is None:
        return OrderedDict()
    setattr(x, "_post_accumulate_grad_hooks", OrderedDict())  # noqa: B010 (unknown to the stubs)
    return hooks


LEAF_NUMBER = 2**64 - 1  # of all nodes at which a backward pass ends, in parameters


def go_at_once(x: torch.Tensor) -> None:
    """Let a backward pass do what made a tensor as soon as it can, as it does the end at a parameter."""
    move: Any = getattr(x.grad_fn, "_set_sequence_nr", None)
    if move is not None:
        move(LEAF_NUMBER)


def node_number(node: Any) -> int:
    """Which one of this thread's it was to be made."""
    number: int = node._sequence_nr() if hasattr(node, "_sequence_nr") else LEAF_NUMBER
    return number


def function_of(node: Any) -> Any:
    """The ``torch.autograd.Function`` that a node is of; None: it is of torch's own."""
    return getattr(node, "_forward_cls", None)


_looks_for_hooks = hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks")


def passed_over(pack: Any, outer: Any) -> Any:
    """A hook that packs saved tensors, which torch's selective checkpointing takes for none of the program's.

    From torch 2.15 on that looks which ones a program has around it, and warns of them.

    Args:
        outer: the hooks around it, if there are some.
    """
    if _looks_for_hooks:
        pack._checkpoint_internal, pack._user_hooks = True, outer
    return pack


# ---- those of modules, by which they are found in ``vars(module)``

TABLES = PARAMETERS, BUFFERS, MODULES = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
STATE_NOTES = "_metadata"  # of a state dict: what modules say of their version
COMPILED_CALL = "_compiled_call_impl"  # what ``module.compile()`` has put in the place of its call


def parametrized_values() -> dict[Any, Any]:
    """What ``torch.nn.utils.parametrize.cached`` keeps while it is open, to be changed, too."""
    return parametrize._cache


def written_in_python(scripted: Any) -> Callable[..., Any] | None:
    """What a function of TorchScript was made of; None of a method."""
    source: Callable[..., Any] | None = getattr(scripted, "_torchdynamo_inline", None)
    return source


def put_in_place(module: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Put ``wrapper(function)`` in the place of one of torch's, which TorchScript goes on to know as that."""
    original = getattr(module, name)
    made = wrapper(original)
    setattr(module, name, made)
    builtins: Any = getattr(torch.jit, "_builtins", None)
    if builtins is not None and (operator := builtins._find_builtin(original)) is not None:
        builtins._register_builtin(made, operator)


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, to be changed, too."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, Any]:
    """The same of its buffers."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, Any]:
    """The same of the modules that it holds."""
    return module._modules


def parameters_within(module: torch.nn.Module, but: Iterable[int] = ()) -> list[torch.nn.Parameter]:
    """Each parameter of a module and of all in it once, in the order of ``named_parameters()``.

    Args:
        but: the ``id`` of modules that are left out, with all in them.
    """
    known: dict[int, torch.nn.Parameter] = {}
    visited = {*but}
    waiting: list[torch.nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is None or id(inner) in visited:
            continue
        visited.add(id(inner))
        for p in inner._parameters.values():
            if p is not None:
                known.setdefault(id(p), p)
        waiting += [*inner._modules.values()][::-1]
    return [*known.values()]


def forward_hooks(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """What is called before a module's forward, and after it."""
    return module._forward_pre_hooks, module._forward_hooks


def own_apply(kind: Any, module: Any) -> Any:
    """What moves or casts all that a module has, of its classes behind one."""
    return super(kind, module)._apply


def own_load(kind: Any, module: Any) -> Any:
    """What takes a module's own part of a state dict, of its classes behind one."""
    return super(kind, module)._load_from_state_dict


def goes_by_apply(method: Any) -> bool:
    """Whether a method of modules moves or casts all that they have."""
    return "_apply" in getattr(getattr(method, "__code__", None), "co_names", ())


def keeps_state_its_own_way(module: torch.nn.Module) -> bool:
    """Whether a module gives or takes its part of a state dict by hooks, or by methods not of torch."""
    hooks = module._state_dict_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    methods: tuple[Any, ...] = module._save_to_state_dict, module._load_from_state_dict
    return any(hooks) or not all(str(m.__module__).startswith("torch.") for m in methods)


def forget_backward_hooks(module: torch.nn.Module) -> None:
    """Let nothing be called before and after a module's backward."""
    module._backward_pre_hooks, module._backward_hooks = OrderedDict(), OrderedDict()


def hooks_of_all_modules(names: Iterable[str]) -> list[dict[int, Any]]:
    """What is called for every module where it calls its own of these ``HOOKS``."""
    return [getattr(torch.nn.modules.module, f"_global{name}", {}) for name in names]


def flat_weights(recurrent: Any) -> list[torch.Tensor | None]:
    """The weights of a recurrent module, as its kernels take them."""
    weights: list[torch.Tensor | None] = recurrent._flat_weights
    return weights


def watch_flat_weights(recurrent: Any, on: bool) -> None:
    """Let it see, by weak references, when they are exchanged for others; torch exchanges none then."""
    weights = flat_weights(recurrent) if on else ()
    recurrent._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]


def compile_call(module: torch.nn.Module, compiled: Callable[[Callable[..., Any]], Any]) -> None:
    """Call what ``compiled`` makes of a module's call, hooks and all, in its place."""
    module._compiled_call_impl = compiled(module._call_impl)


def call_as_written(module: torch.nn.Module) -> bool:
    """Let a module that ``torch.compile`` compiles run uncompiled, in place; gives whether it is one."""
    # not imported, which takes long: without it there are none
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    if isinstance(module, dynamo.OptimizedModule):
        vars(module)["forward"] = module._orig_mod.__call__
        return True
    if hasattr(vars(module).get(COMPILED_CALL), "_torchdynamo_orig_callable"):
        vars(module)[COMPILED_CALL] = None
        return True
    return False


# ---- those of optimizers, schedules and samplers

_muon: Any = getattr(torch.optim, "_muon", None)


def replace_muon(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Let another function, made of torch's, update a group of Muon's; where parts lack, torch's own does."""
    if all(hasattr(_muon, name) for name in ("muon", "_zeropower_via_newtonschulz", "_adjust_lr")):
        _muon.muon = make(_muon.muon)


def orthogonalized(matrix: torch.Tensor, *orders: Any) -> torch.Tensor:
    """What Muon makes of a matrix of momenta, in bfloat16: by coefficients, steps and the least norm."""
    of_matrix: torch.Tensor = _muon._zeropower_via_newtonschulz(matrix, *orders)
    return of_matrix


def muon_rate(rate: float, adjust: str | None, shape: torch.Size) -> float:
    """The learning rate that Muon has for a matrix of that shape."""
    adjusted: float = _muon._adjust_lr(rate, adjust, shape)
    return adjusted


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has another step than its class, but for what torch's schedules put around it.

    A schedule made before this library was loaded has kept the step that the class had then: torch's own
    hooks around the same function.
    """
    step = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    own = type(optimizer).step
    if step is None or getattr(step, "__func__", step) is own:
        return False
    within: Any = getattr(step, "__wrapped__", None) if getattr(step, "hooked", False) else None
    was_torchs = within is not None and not getattr(within, "hooked", False)
    return not was_torchs or inspect.unwrap(within) is not inspect.unwrap(own)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run around an optimizer's step, but for those of all."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def keeps_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it may have hooks: ``torch.optim.Optimizer`` has made it, or restored it."""
    return {"_optimizer_step_pre_hooks", "_optimizer_load_state_dict_post_hooks"} <= vars(optimizer).keys()


def forget_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let none run around its step."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def call_before_step(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    """Call its hooks before ``optimizer.step(closure)``, as torch does; gives the closure that they leave."""
    args, options = (optimizer, closure), dict[str, Any]()
    for hook in tuple(optimizer._optimizer_step_pre_hooks.values()):
        given: Any = hook(optimizer, args, options)
        if given is not None:
            args, options = given
    return args[1] if len(args) > 1 else options.get("closure")


@contextmanager
def without_hooks_before_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, none of its own runs."""
    kept, optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks, OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = kept


@contextmanager
def without_step_hooks(parts: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, no hooks run around the steps of these optimizers, nor those of all."""
    homes = [
        *((optimizers, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")),
        *((part, f"_optimizer_step_{when}_hooks") for part in parts for when in ("pre", "post")),
    ]
    kept = [(home, name, getattr(home, name)) for home, name in homes]
    for home, name in homes:
        setattr(home, name, OrderedDict())
    try:
        yield
    finally:
        for home, name, hooks in kept:
            setattr(home, name, hooks)


def steps_of(schedule: Any) -> int:
    """How many steps a schedule of learning rates has taken, with the one at its beginning."""
    steps: int = schedule._step_count
    return steps


def set_last_rates(schedule: torch.optim.lr_scheduler.LRScheduler, rates: list[Any]) -> None:
    """What its ``get_last_lr()`` says from now on."""
    schedule._last_lr = rates


def draws_all(sampler: Any) -> bool:
    """Whether a ``RandomSampler`` was asked for no certain number of samples, so that it draws each once."""
    return sampler._num_samples is None


# ---- those of operators, and of libraries of them


def schema_of(operator: Any) -> Any:
    """What an operator says of its arguments and of what it gives."""
    return operator._schema


def can_decompose(operator: Any) -> bool:
    """Whether torch itself does it by others."""
    does: bool = operator._can_decompose()
    return does


def forget_library(library: Any) -> None:
    """Take back what a ``torch.library.Library`` has registered."""
    library._destroy()


JVP, VJP = "_jvp_with_argnums", "_vjp_with_argnums"  # of ``functorch_transforms``: torch.func.jvp and .vjp

# ---- those of process groups and meshes


def backend_for(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """What carries a group's tensors of a device."""
    return group._get_backend(device)


def timeout_of(backend: Any) -> timedelta:
    """How long its collectives may wait."""
    timeout: timedelta = backend.options._timeout
    return timeout


def root_mesh(mesh: Any) -> Any:
    """The ``DeviceMesh`` that one is a slice of; itself if it is none."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def forget_groups(mesh: Any) -> None:
    """Let go of the process groups that a ``DeviceMesh`` and its slices hold."""
    vars(root_mesh(mesh)).get("_pg_registry", {}).clear()


def strided_shard() -> Any:
    """torch's word for a dim that a later axis of the mesh cuts first; None: it has none."""
    from torch.distributed.tensor import placement_types

    return getattr(placement_types, "_StridedShard", None)


# ---- process groups of the running world


def set_group_timeout(timeout: timedelta) -> None:
    """How long collectives of the running world may wait from now on."""
    # torch 2.14 made it public, and warns of the private name
    say: Any = getattr(torch.distributed, "set_timeout", None)
    (say or torch.distributed.distributed_c10d._set_pg_timeout)(timeout)


def forget_failed_world() -> None:
    """Let the next world have the first one's name on all ranks, also where a try to join one has failed."""
    torch.distributed.distributed_c10d._world.group_count = 0


def default_store() -> Any:
    """The store by which the ranks of the running world have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def note_constructors() -> None:
    """Which functions of torch a default device is for, before one of them is wrapped."""
    torch.utils._device._device_constructors()  # it is remembered


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


def let_check(distribution: Any, checks: bool | None) -> None:
    """Say whether a distribution looks at what its methods are given; None: as all do."""
    vars(distribution).pop("_validate_args")
    if checks is not None:
        distribution._validate_args = checks


def unchecked_distributions() -> AbstractContextManager[None]:
    """While open, distributions do not look at their arguments, unless they are told to."""
    return having(torch.distributions.Distribution, _validate_args=False)


@contextmanager
def as_in_backward(has_gradient: Callable[[Any], bool]) -> Iterator[None]:
    """While open, hooks on gradients are called as within a backward pass that gives parameters theirs.

    ``torch.autograd.graph.register_multi_grad_hook`` asks which pass it is, and whose gradients will come.
    """
    if current_graph_task_id() != -1:
        yield
        return
    number = -2 - time.monotonic_ns()
    asked: dict[str, Callable[..., Any]] = {
        "_current_graph_task_id": lambda: number,
        "_will_engine_execute_node": lambda node: has_gradient(getattr(node, "variable", None)),
    }
    with having(torch._C, **asked):
        yield


# ---- functions of torch that are wrapped: those that don't ask ``__torch_function__``

DOORS = {
    "conversion": "torch.nn:Module._apply",  # what becomes of a module's parameters
    "backward hooks": "torch.utils.hooks:BackwardHook._apply_on_tensors",
    # in torch 2.15 ``checkpoint`` calls the first
    "recomputation of what is given": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",
    "recomputation": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "starts": "torch.autograd:_make_grads",
    "kinds of parameters": "torch.nn.parameter:_ParameterMeta.__instancecheck__",
    "vmap": "torch._functorch.vmap:_add_batch_dim",
    "grad": "torch._functorch.eager_transforms:_wrap_for_grad",
    "functionalize": "torch._functorch.eager_transforms:_wrap_all_tensors_to_functional",
    "functional": "torch.nn.functional:handle_torch_function",
    "norm": "torch.nn.utils.clip_grad:_get_total_norm",
    "clipping": "torch.nn.utils.clip_grad:_clip_grads_with_norm_",
    "grouping": "torch.nn.utils.clip_grad:_group_tensors_by_device_and_dtype",
    "grouping of averages": "torch.optim.swa_utils:_group_tensors_by_device_and_dtype",
    # by the names that programs use
    "named norm": "torch.nn.utils:get_total_norm",
    "named clipping": "torch.nn.utils:clip_grads_with_norm_",
    # torch's helpers for state dicts
    "walk": "torch.distributed._state_dict_utils:_iterate_state_dict",
    "broadcast": "torch.distributed._state_dict_utils:_broadcast_tensors",
    "broadcast dict": "torch.distributed.checkpoint.state_dict:_broadcast_state_dict",
    "distribute dict": "torch.distributed.checkpoint.state_dict:_distribute_state_dict",
    "optimizer states": "torch.distributed.checkpoint.state_dict:_get_optim_state_dict",
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


_clips = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__


def clipped_now() -> list[torch.Tensor] | None:
    """The parameters whose gradients ``clip_grad_norm_`` clips, if that calls what calls this."""
    frame = sys._getframe(2)
    held = frame.f_locals.get("parameters") if frame.f_code is _clips else None
    return held if isinstance(held, list) else None


# asks for the gradients that GradScaler looks through
unscales: Any = getattr(getattr(torch.amp.GradScaler, "_unscale_grads_", None), "__code__", None)
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
        # kernels (backward of convolutions) give other strides than the tracer was told
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        rewrite(module.graph)
        module.recompile()
        return boxed_nop(module, inputs)

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return whole(module, inputs, fw_compiler=compile, bw_compiler=compile)

    return backend


def all_given(func: Any, kwargs: Any) -> dict[str, Any]:
    """The named arguments of a call that torch shows, with that which it leaves out.

    Of ``l1_loss`` it is the weight, so whoever calls again what was shown would call something else.
    """
    if func is not l1_loss or "weight" in (kwargs := kwargs or {}):
        return kwargs or {}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is l1_loss.__code__ and (weight := frame.f_locals.get("weight")) is not None:
            return {**kwargs, "weight": weight}
        frame = frame.f_back
    return kwargs


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


def keep_own_list(optimizer: torch.optim.Optimizer) -> None:
    """Let LBFGS, which keeps the list of its parameters beside its group, have the one that stands there."""
    if "_params" in vars(optimizer):
        optimizer._params = optimizer.param_groups[0]["params"]  # type: ignore[attr-defined]
