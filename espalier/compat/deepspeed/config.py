"""DeepSpeed's JSON configuration as a plan, an optimizer, a schedule and what an engine tells on its way.

Nothing is dropped in silence: ``espalier.compat.deepspeed.keys`` says what becomes of each key.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

from pydantic import TypeAdapter, ValidationError

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed import answers
from espalier.compat.deepspeed.keys import ALIASES, KEYS, Key
from espalier.compat.deepspeed.monitor import get_monitor_config
from espalier.mesh.process import running_rank, running_size
from espalier.parallel.plan import Plan
from espalier.texts import MISSING, Mistake, MistakeError, listed, unknown_key

_OWNER = "DeepSpeed's configuration"
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PLACES = {"none": "device", "cpu": "host", "nvme": "disk"}
_CLIPS = 1.0  # DeepSpeed's own, where a configuration says nothing
_AUTO = "auto"  # filled in by transformers' Trainer; DeepSpeed takes it for its default
_DEFAULT_CHUNK = Plan().chunk_megabytes


class Choice(NamedTuple):
    """An optimizer or a schedule, by name."""

    name: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """What a configuration says, for a number of ranks.

    Attributes:
        plan: how the model is laid out.
        train_batch: rows of a step, over all ranks.
        micro_batch: rows of a micro-batch on one rank.
        optimizer, scheduler: None where the program brings its own.
        skips: whether steps whose gradients are not finite are skipped (beside those of float16, which are).
        values: each key that was given and is honoured, dotted, with its value.
        idle: keys that were given and have no effect here.
        configured: each key that was given, dotted, with its value.
    """

    plan: Plan
    train_batch: int
    micro_batch: int
    optimizer: Choice | None = None
    scheduler: Choice | None = None
    skips: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[Key, ...] = ()
    configured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> str:
        """What has no effect, and why; empty if all that was given has."""
        if not self.idle:
            return ""
        head = f"{_OWNER}: without an effect here"
        return listed(head, [f"{key.name}: {key.reason.replace('`', '')}" for key in self.idle])


def load(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a configuration: a dict, a JSON file, or JSON in base64.

    Raises:
        ValueError: it cannot be read; a key stands there twice.
    """
    if isinstance(config, Mapping):
        return dict(config)
    try:
        path = Path(config)
        text = path.read_text("utf-8") if path.is_file() else base64.urlsafe_b64decode(str(config)).decode()
        tables = json.loads(text, object_pairs_hook=_once)
    except (OSError, binascii.Error, UnicodeDecodeError):
        raise ValueError(
            f"{_OWNER} {str(config)[:80]!r}: expected a dict, the path of a JSON file, or its base64."
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{_OWNER} {config}: not JSON: {error}.") from None
    if not isinstance(tables, dict):
        raise ValueError(f"{_OWNER} {config}: expected a table, got {type(tables).__name__}.")
    return tables


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MistakeError(_OWNER, [(name, MISSING, "stands there twice") for name in twice])
    return dict(pairs)


def read(
    config: str | Path | Mapping[str, Any],
    ranks: int,
    *,
    pipe: int = 1,
    plan: Mapping[str, Any] | None = None,
) -> Config:
    """What a configuration says.

    Args:
        config: as for :func:`load`.
        ranks: of the world.
        pipe: stages of a pipeline, which the program says by its ``PipelineModule``.
        plan: further arguments of the plan, which DeepSpeed has no word for.

    Raises:
        ValueError: listing every mistake: unknown keys, wrong values, what is not to be had here.
    """
    tables = load(config)
    values, idle, mistakes = examine(tables)
    settings = _Reading(values, ranks, pipe, mistakes).config(plan or {}, tuple(idle))
    if mistakes or settings is None:
        raise MistakeError(_OWNER, mistakes)
    return replace(settings, configured={**_flat(tables, []), **values})


def examine(tables: Mapping[str, Any]) -> tuple[dict[str, Any], list[Key], list[Mistake]]:
    """Each key of a configuration by itself: those that are honoured with their values, those without an
    effect, and what is wrong with the others."""
    mistakes: list[Mistake] = []
    values = _flat(tables, mistakes)
    idle: list[Key] = []
    for name, value in [*values.items()]:
        key = KEYS[name]
        if key.fate == "honoured":
            try:
                values[name] = TypeAdapter(key.kind).validate_python(value)
            except ValidationError as error:
                for item in error.errors(include_url=False)[:1]:
                    mistakes.append(Mistake(name, value, item["msg"].replace("Input should be", "expected")))
                del values[name]
            continue
        del values[name]
        if key.fate == "no effect":
            idle.append(key)
        elif not _is_harmless(value, key.harmless):
            mistakes.append(Mistake(name, value, f"not to be had here: {key.reason}"))
    return values, idle, mistakes


def _flat(tables: Mapping[str, Any], mistakes: list[Mistake]) -> dict[str, Any]:
    """Each known key that was given, dotted."""
    tables, values = dict(tables), dict[str, Any]()
    if isinstance(tables.get("zero_optimization"), bool):  # of old
        tables["zero_optimization"] = {"stage": int(tables["zero_optimization"])}
    _flatten(tables, "", values, mistakes)
    return values


def _flatten(
    tables: Mapping[str, Any], section: str, values: dict[str, Any], mistakes: list[Mistake]
) -> None:
    for key, value in tables.items():
        name = ALIASES.get(section + key, section + key)
        if value == _AUTO and name != "pipeline.stages":
            continue
        is_section = any(known.startswith(f"{name}.") for known in KEYS)
        if is_section and isinstance(value, Mapping):
            _flatten(value, f"{name}.", values, mistakes)
            if name in KEYS:
                values[name] = dict(value)
        elif name in KEYS:
            values[name] = value
        elif is_section:
            if value is not None:
                mistakes.append(Mistake(name, value, 'expected a table, as {"enabled": true}'))
        else:
            names = (known.removeprefix(section) for known in [*KEYS, *ALIASES] if known.startswith(section))
            siblings = sorted({known.partition(".")[0] for known in names})
            mistakes.append(unknown_key(name, value, siblings))


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    off = isinstance(value, Mapping) and value.get("enabled") is False and {"enabled": False} in harmless
    return off or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless)


class _Reading:
    """Values, dotted, as a plan."""

    def __init__(self, values: dict[str, Any], ranks: int, pipe: int, mistakes: list[Mistake]) -> None:
        self.values, self.ranks, self.pipe, self.mistakes = values, ranks, pipe, mistakes

    def _wrong(self, key: str, expected: str) -> None:
        self.mistakes.append(Mistake(key, self.values.get(key, MISSING), expected))

    def config(self, more: Mapping[str, Any], idle: tuple[Key, ...]) -> Config | None:
        get = self.values.get
        tensor, context = max(get("tensor_parallel.autotp_size") or 1, 1), get("sequence_parallel_size") or 1
        groups = {"pipe": self.pipe, "tensor": tensor, "context": context}
        groups.update({name: more[name] for name in groups if name in more})
        each = groups["pipe"] * groups["tensor"] * groups["context"]
        if self.ranks % each:
            product = " × ".join(f"{name} {n}" for name, n in groups.items() if n > 1)
            self.mistakes.append(Mistake("", MISSING, f"{self.ranks} ranks are no multiple of {product}"))
            return None
        share = self.ranks // each
        rows, micro, accumulate = self._batch(share)
        stage = get("zero_optimization.stage", 0)
        arguments: dict[str, Any] = {
            **{name: n for name, n in groups.items() if n > 1},
            **self._data(share, stage),
            "zero": stage,
            "accumulate": accumulate,
            "precision": (precision := self._precision()),
            "clip": get("gradient_clipping", _CLIPS) or None,
            **self._sizes(stage, 2 if precision["compute"] in ("float16", "bfloat16") else 4),
        }
        if context > 1:
            arguments["context_kind"] = "ulysses"
        if offload := self._offload(stage):
            arguments["offload"] = offload
        if get("pipeline.activation_checkpoint_interval"):
            arguments["recompute"] = "full"
        if get("activation_checkpointing.cpu_checkpointing"):
            arguments["recompute_inputs"] = "host"
        elif get("activation_checkpointing.partition_activations"):
            arguments["recompute_inputs"] = "sharded"
        stages = get("pipeline.stages", _AUTO)
        if stages not in (_AUTO, groups["pipe"]):
            self._wrong("pipeline.stages", f"the model is a pipeline of {groups['pipe']} stage(s)")
        if self.mistakes:
            return None
        return Config(
            plan=Plan(**{**arguments, **more}),
            train_batch=rows,
            micro_batch=micro,
            optimizer=self._choice("optimizer"),
            scheduler=self._choice("scheduler"),
            skips=bool(get("bf16.enabled") and get("bf16.check_grad_overflow", True)),
            values=self.values,
            idle=idle,
        )

    def _batch(self, share: int) -> tuple[int, int, int]:
        """Rows of a step, of a rank's micro-batch, and micro-batches of a step: any two give the third."""
        names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
        rows, micro, steps = cast("tuple[Any, Any, Any]", tuple(self.values.get(name) for name in names))
        if rows is None and micro is None:
            if not self.mistakes:
                self._wrong(names[0], f"is missing, and so is {names[1]}: one of them is needed")
            return 0, 0, 1
        if steps is None:
            several = rows is not None and micro is not None
            steps = max(rows // (micro * share), 1) if several else 1
        if rows is None:
            rows = micro * steps * share
        elif micro is None:
            micro = rows // (steps * share)
        if rows != micro * steps * share:
            product = f"{names[1]} {micro} × {names[2]} {steps} × {share} rank(s) that share the batch"
            self._wrong(names[0], f"expected {product} = {micro * steps * share}")
        return rows, micro, steps

    def _data(self, share: int, stage: int) -> dict[str, int]:
        key = "zero_optimization.zero_hpz_partition_size"
        size = self.values.get(key) or 1
        if size == 1:
            return {"data": share}
        if stage != 3:
            self._wrong(key, "parameters are cut at stage 3 only")
        if share % size:
            self._wrong(key, f"expected a divisor of the {share} rank(s) that share the batch")
        return {"data": size, "replicate": share // size}

    def _precision(self) -> dict[str, Any]:
        get = self.values.get
        names = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")
        chosen = [name for name in names if get(name)]
        if len(chosen) > 1:
            self._wrong(chosen[1], f"{chosen[0]} is so too: expected one of them")
        precision: dict[str, Any] = {"compute": "float32"}
        if get("fp16.enabled"):
            precision = {"compute": "float16", "loss_scale": self._scale()}
        elif get("bf16.enabled"):
            precision = {"compute": "bfloat16"}
        elif get("torch_autocast.enabled"):
            dtype = (get("torch_autocast.dtype") or "bfloat16").removeprefix("torch.")
            dtype = _DTYPES.get(dtype, {"half": "float16"}.get(dtype, dtype))
            precision = {"compute": f"autocast-{dtype}"}
            if dtype not in ("float16", "bfloat16"):
                self._wrong("torch_autocast.dtype", "expected bfloat16 or float16")
        reduce = get("communication_data_type") or get("data_types.grad_accum_dtype")
        if reduce is not None and _DTYPES[reduce] != precision["compute"]:
            precision["reduce"] = _DTYPES[reduce]
        if buffers := get("data_types.buffer_dtype"):
            precision["buffers"] = _DTYPES[buffers]
        return precision

    def _scale(self) -> dict[str, Any]:
        get = self.values.get
        if fixed := get("fp16.loss_scale"):
            return {
                "init_scale": fixed,
                "growth_factor": 1.0,
                "backoff_factor": 1.0,
                "min_scale": min(fixed, 1.0),
            }
        return {
            "init_scale": 2.0 ** get("fp16.initial_scale_power", 16),
            "growth_interval": get("fp16.loss_scale_window", 1000),
            "hysteresis": get("fp16.hysteresis", 2),
            "refill": "always" if get("fp16.consecutive_hysteresis") else "growth",
            "min_scale": float(get("fp16.min_loss_scale", 1.0)),
        }

    def _sizes(self, stage: int, element: int) -> dict[str, float]:
        """Buckets, which are counted in elements, as megabytes."""
        get, sizes = self.values.get, {}
        names = ("reduce_bucket_size", "allgather_bucket_size")
        buckets = [size for name in names if (size := get(f"zero_optimization.{name}"))]
        if buckets:
            sizes["chunk_megabytes"] = min(buckets) * element / 1e6
            if stage == 3:
                sizes["chunk_megabytes"] = min(sizes["chunk_megabytes"], _DEFAULT_CHUNK)
        ahead = get("zero_optimization.stage3_prefetch_bucket_size")
        if ahead is not None and stage == 3:
            sizes["prefetch_megabytes"] = ahead * element / 1e6
        return sizes

    def _offload(self, stage: int) -> dict[str, Any]:
        get, zero = self.values.get, "zero_optimization."
        plan_fields: dict[str, Any] = {}
        directories: dict[str, str] = {}
        for kind, of_old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
            section = f"{zero}{kind}"
            place = _PLACES["cpu" if get(zero + of_old) else get(f"{section}.device", "none")]
            if place == "device":
                continue
            if kind == "offload_param" and stage != 3:
                self._wrong(section, f"parameters lie whole on each rank at stage {stage}: expected stage 3")
            elif stage == 0:
                self._wrong(section, "states lie whole on each rank at stage 0: expected stage 1, 2 or 3")
            if place == "disk":
                if path := get(f"{section}.nvme_path"):
                    directories[section] = path
                else:
                    self._wrong(f"{section}.nvme_path", "is missing, and device is nvme")
            share = {"place": place, "ratio": get(f"{section}.ratio", 1.0)}
            if kind == "offload_param":
                plan_fields["parameters"] = share
            else:
                plan_fields["states"] = share
                if stage >= 2:
                    plan_fields["gradients"] = share
        if len({*directories.values()}) > 1:
            section = [*directories][1]
            self._wrong(
                f"{section}.nvme_path", "expected the same as offload_optimizer's: there is one directory"
            )
        if directories:
            plan_fields["directory"] = next(iter(directories.values()))
        return plan_fields

    def _choice(self, kind: str) -> Choice | None:
        name, params = self.values.get(f"{kind}.type"), self.values.get(f"{kind}.params") or {}
        arguments = {key: value for key, value in params.items() if value != _AUTO}
        return None if name is None else Choice(name, arguments)


# sections that DeepSpeed has under another name
_SECTIONS: Final = {
    "zero_config": "zero_optimization",
    "float16_config": "fp16",
    "bfloat16_config": "bf16",
    "activation_checkpointing_config": "activation_checkpointing",
    "flops_profiler_config": "flops_profiler",
    "comms_config": "comms_logger",
    "tensor_parallel_config": "tensor_parallel",
    "checkpoint_config": "checkpoint",
    "pipeline": "pipeline",
}


class DeepSpeedConfig:
    """What a configuration says, by DeepSpeed's names.

    Args:
        config: a dict, or the path of a JSON file.
        mpu: its ``get_data_parallel_world_size()`` ranks share the batch.

    Attributes:
        settings: as :func:`espalier.compat.deepspeed.read` gives it.
        world_size: ranks that share the batch.
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: all three.
        zero_config, float16_config, bfloat16_config, ...: the keys of a section that were given.

    What DeepSpeed's engine answers by methods (``gradient_clipping``, ``optimizer_params``, ...) is an
    attribute here.

    Raises:
        DeepSpeedConfigError: listing every mistake.
    """

    def __init__(
        self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        self._param_dict = load(config)
        ranks = running_size()
        self.global_rank = running_rank()
        if mpu is not None:
            ranks = mpu.get_data_parallel_world_size()
        self.settings: Config = read(self._param_dict, ranks)
        plan = self.settings.plan
        self.train_batch_size = self.settings.train_batch
        self.train_micro_batch_size_per_gpu = self.settings.micro_batch
        self.gradient_accumulation_steps = plan.accumulate
        self.world_size = self.train_batch_size // (self.settings.micro_batch * plan.accumulate)
        self.zero_optimization_stage, self.zero_enabled = int(plan.zero), bool(plan.zero)
        self.gradient_clipping = plan.clip or 0.0
        chosen = self.settings.optimizer
        self.optimizer_name = None if chosen is None else answers.optimizer_name(chosen.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        given = self.settings.configured
        if name == "monitor_config":
            return get_monitor_config(self._param_dict)
        if name in _SECTIONS:
            start = f"{_SECTIONS[name]}."
            found = {key.removeprefix(start): x for key, x in given.items() if key.startswith(start)}
            if name == "zero_config":
                found |= {"stage": self.zero_optimization_stage}
            elif "16" in name:
                found.setdefault("enabled", False)
            return SimpleNamespace(**{key: x for key, x in found.items() if "." not in key})
        if name in answers.GIVEN or name in answers.OFF:
            return answers.answer(name, given)
        if name in given:
            return given[name]
        raise AttributeError(answers.missing(name, type(self).__name__))

    def print(self, name: str) -> None:
        """Print what was given."""
        print(f"{name}:", *(f"  {key} = {x!r}" for key, x in self.settings.configured.items()), sep="\n")


DeepSpeedConfigError = MistakeError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.config",
    {
        "DeepSpeedConfigWriter DtypeEnum HybridEngineConfig get_checkpoint_parallel_write_pipeline "
        "get_checkpoint_params get_checkpoint_tag_validation_mode get_communication_data_type "
        "get_data_types_params get_dataloader_drop_last get_disable_allgather get_disable_python_gc "
        "get_dump_state get_expert_data_topo_config get_expert_parallel_config "
        "get_gradient_accumulation_steps get_gradient_allreduce_op get_gradient_clipping "
        "get_gradient_predivide_factor get_hybrid_engine_config get_log_level "
        "get_lower_precision_safe_modules get_managed_gradient_accumulation get_memory_breakdown "
        "get_optimizer_gradient_clipping get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params "
        "get_pipeline_config get_prescale_gradients get_scheduler_name get_scheduler_params "
        "get_steps_per_print get_torch_autocast_dtype get_torch_autocast_enabled get_train_batch_size "
        "get_train_micro_batch_size_per_gpu get_wall_clock_breakdown get_zero_allow_untested_optimizer "
        "get_zero_force_ds_cpu_optimizer": "DeepSpeedConfig(config) has each key as an attribute",
    },
)
