"""``espalier migrate``: which line of a program becomes which, and what has no equivalent.

The program is read, not run. Imports of DeepSpeed, Colossal-AI, torch's wrappers and DTensor, transformers'
Trainer, accelerate and Lightning become those of ``espalier.compat``, if the name is there; names used
in full are replaced where they stand; configurations that stand in the program, or in a JSON file that it
names, are examined key by key. The rest of the program stays as it is, to the letter.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple

from espalier.compat.absent import Absent, AbsentModule
from espalier.texts import MistakeError


class Note(NamedTuple):
    """What the diff does not show.

    Attributes:
        line: of the program, from 1.
        text: what is to be known of it.
        is_missing: whether it has no equivalent: the program does not run as it is.
    """

    line: int
    text: str
    is_missing: bool = False


class Migration(NamedTuple):
    """A program before and after.

    Attributes:
        before, after: its text.
        notes: in the order of lines.
        systems: from which it comes.
    """

    before: str
    after: str
    notes: tuple[Note, ...]
    systems: tuple[str, ...]

    def diff(self, name: str) -> str:
        """A unified diff; empty if nothing changes."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, name, name))


class _Move(NamedTuple):
    """Where what a package holds comes from.

    Attributes:
        system: its name.
        to: the package here.
        names: those that move; None: all, under the same submodules.
        hint: what to do where one is not there.
        known: those that are there, whether what the package here builds on is installed or not.
    """

    system: str
    to: str
    names: frozenset[str] | None = None
    hint: str = ""
    known: frozenset[str] = frozenset()


_TORCH = "espalier.compat.torch"
_FSDP = frozenset(
    "FullyShardedDataParallel fully_shard FSDPModule MixedPrecision MixedPrecisionPolicy CPUOffload "
    "CPUOffloadPolicy OffloadPolicy ShardingStrategy BackwardPrefetch StateDictType FullStateDictConfig "
    "ShardedStateDictConfig LocalStateDictConfig FullOptimStateDictConfig ShardedOptimStateDictConfig "
    "register_fsdp_forward_method share_comm_ctx UnshardHandle OptimStateKeyType".split()
)
_PIPELINING = _Move(
    "torch",
    f"{_TORCH}.pipelining",
    frozenset(
        "pipeline Pipe SplitPoint pipe_split get_schedule_class PipelineStage build_stage ScheduleGPipe "
        "Schedule1F1B ScheduleInterleaved1F1B ScheduleLoopedBFS ScheduleInterleavedZeroBubble "
        "ScheduleZBVZeroBubble ScheduleDualPipeV TensorChunkSpec sum_reducer".split()
    ),
    'espalier.initialize(model, optimizer, {"pipe": n, "schedule": ...}) cuts the model by itself',
)
_DTENSOR = _Move("torch's DTensor", "espalier", None, "docs/from-torch.md says what differs")
_FABRIC = _Move(
    "Lightning Fabric",
    "espalier.compat.fabric",
    frozenset("DDPStrategy FSDPStrategy DeepSpeedStrategy ModelParallelStrategy".split()),
    "Fabric(strategy=EspalierStrategy(plan={...})) of espalier.compat.fabric, see docs/lightning-fabric.md",
    frozenset({"DDPStrategy"}),
)
_TRAINERS_OF_LIGHTNING = _Move(
    "Lightning",
    "espalier.compat.lightning",
    _FABRIC.names,
    "Trainer(strategy=EspalierStrategy(plan={...})) of espalier.compat.lightning, docs/lightning-fabric.md",
)
_MOVES: Final = MappingProxyType(
    {
        "deepspeed": _Move("DeepSpeed", "espalier.compat.deepspeed", None, "see docs/deepspeed.md"),
        "colossalai": _Move("Colossal-AI", "espalier.compat.colossalai", None, "see docs/colossal-ai.md"),
        "torch.nn": _Move("torch", _TORCH, frozenset({"DataParallel"})),
        "torch.nn.parallel": _Move("torch", _TORCH, frozenset({"DataParallel", "DistributedDataParallel"})),
        "torch.nn.parallel.distributed": _Move("torch", _TORCH, frozenset({"DistributedDataParallel"})),
        "torch.distributed.fsdp": _Move("torch", f"{_TORCH}.fsdp", _FSDP),
        "torch.distributed.fsdp.fully_sharded_data_parallel": _Move("torch", f"{_TORCH}.fsdp", _FSDP),
        "torch.distributed.fsdp._fully_shard": _Move("torch", f"{_TORCH}.fsdp", _FSDP),
        "torch.distributed._composable.fsdp": _Move("torch", f"{_TORCH}.fsdp", _FSDP),
        "torch.distributed.optim": _Move("torch", _TORCH, frozenset({"ZeroRedundancyOptimizer"})),
        "torch.distributed.pipeline.sync": _Move("torch", _TORCH, frozenset({"Pipe"})),
        "torch.distributed.pipelining": _PIPELINING,
        "torch.distributed.pipelining.schedules": _PIPELINING,
        "torch.distributed.pipelining.stage": _PIPELINING,
        "torch.distributed.pipelining.microbatch": _PIPELINING,
        "torch.distributed.tensor": _DTENSOR,
        "torch.distributed.tensor.parallel": _DTENSOR,
        "torch.distributed._tensor": _DTENSOR,
        "transformers": _Move(
            "transformers",
            "espalier.compat.transformers",
            frozenset({"Trainer", "Seq2SeqTrainer"}),
            "a plain loop: espalier.prepare(model, optimizer, loader, plan={...})",
        ),
        "accelerate": _Move(
            "accelerate",
            "espalier.compat.accelerate",
            frozenset({"Accelerator", "notebook_launcher", "debug_launcher"}),
            "see docs/accelerate.md",
        ),
        "accelerate.local_sgd": _Move("accelerate", "espalier.compat.accelerate", frozenset({"LocalSGD"})),
        "lightning_fabric.strategies": _FABRIC,
        "lightning.fabric.strategies": _FABRIC,
        "pytorch_lightning.strategies": _TRAINERS_OF_LIGHTNING,
        "lightning.pytorch.strategies": _TRAINERS_OF_LIGHTNING,
    }
)

_SPAWN = 'espalier.spawn(lambda mesh: function(), {"data": n}) starts n ranks'
# what a program may ask for that is another thing here
_HINTS: Final = MappingProxyType(
    {
        "accelerate.debug_launcher": _SPAWN,
        "accelerate.local_sgd.LocalSGD": "leave it out: every step is of all rows",
        "accelerate.notebook_launcher": _SPAWN,
    }
)
# arguments that ask another library for parallelism, and who takes a plan in their place
_ARGUMENTS: Final = MappingProxyType(
    {
        "transformers.TrainingArguments": (
            "Trainer",
            ("deepspeed", "fsdp", "fsdp_config", "parallelism_config"),
        ),
        "accelerate.Accelerator": (
            "Accelerator",
            ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"),
        ),
    }
)
# what takes a strategy, and which is there in its place
_LIGHTNINGS: Final = MappingProxyType(
    {
        **dict.fromkeys(
            "lightning_fabric.Fabric lightning_fabric.fabric.Fabric lightning.Fabric lightning.fabric.Fabric "
            "lightning.fabric.fabric.Fabric".split(),
            _FABRIC,
        ),
        **dict.fromkeys(
            "pytorch_lightning.Trainer pytorch_lightning.trainer.Trainer lightning.Trainer "
            "lightning.pytorch.Trainer lightning.pytorch.trainer.Trainer".split(),
            _TRAINERS_OF_LIGHTNING,
        ),
    }
)
# what Lightning calls strategies, as keys of a plan
_STRATEGIES: Final = MappingProxyType(
    {
        "ddp": "",
        "ddp_find_unused_parameters_false": "",
        "ddp_find_unused_parameters_true": "",
        "fsdp": "{'zero': 3}",
        "deepspeed": "{'zero': 2}",
        "deepspeed_stage_1": "{'zero': 1}",
        "deepspeed_stage_2": "{'zero': 2}",
        "deepspeed_stage_3": "{'zero': 3}",
    }
)
_TRAINER = 'Trainer(..., plan={"data": 2, "zero": 3}), say, tells how to lay the model out'


def migrate(source: str, folder: Path | None = None) -> Migration:
    """A program written for another system, as one for Espalier.

    Args:
        source: its text.
        folder: where files that it names are.

    Raises:
        SyntaxError: it is no Python.
    """
    return _Program(source, folder or Path()).migrated()


class _Edit(NamedTuple):
    start: tuple[int, int]  # line from 1, byte
    end: tuple[int, int]
    text: str


class _Program:
    def __init__(self, source: str, folder: Path) -> None:
        self.source, self.folder, self.tree = source, folder, ast.parse(source)
        self.edits: list[_Edit] = []
        self.notes: list[Note] = []
        self.systems: set[str] = set()
        self.names: dict[str, str] = {}  # what a name of the program stands for, in full
        self.wanted: set[tuple[str, str]] = set()  # names used in full, and where they are here
        self.tables: dict[str, Any] = {}  # literals that a name stands for

    def migrated(self) -> Migration:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Constant):
                self.tables |= {x.id: node.value for x in node.targets if isinstance(x, ast.Name)}
        for node in _chains(self.tree):
            self._use(node)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                self._call(node)
        if self.wanted:
            line = self._last_import()
            for origin in sorted({origin for origin, _ in self.wanted}):
                names = sorted(name for of, name in self.wanted if of == origin)
                text = f"from {origin} import {', '.join(names)}\n"
                self.edits.append(_Edit((line + 1, 0), (line + 1, 0), text))
        notes = sorted({*self.notes})
        return Migration(self.source, self._edited(), tuple(notes), tuple(sorted(self.systems)))

    # ---- imports

    def _import(self, node: ast.Import) -> None:
        lines, stays = [], []
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            self.names[bound] = alias.name if alias.asname else bound
            root = alias.name.partition(".")[0]
            move = _MOVES.get(root)
            if move is None or move.names is not None:
                stays.append(alias)
                continue
            self.systems.add(move.system)
            target = move.to + alias.name.removeprefix(root)
            package, _, last = target.rpartition(".")
            there = _module(target)
            if there is None or isinstance(there, AbsentModule):
                self._missing(node.lineno, alias.name, move, getattr(there, "instead", ""))
                stays.append(alias)
            elif alias.asname:
                lines.append(f"from {package} import {_as(last, alias.asname)}")
            else:
                base, _, name = move.to.rpartition(".")
                lines.append(f"from {base} import {_as(name, root)}")
        if lines:
            kept = [f"import {', '.join(_as(a.name, a.asname) for a in stays)}"] if stays else []
            self._replace(node, [*kept, *dict.fromkeys(lines)])

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
        move, rest = _move(module)
        if move is None:
            return
        target = move.to + rest if move.names is None and move.to != "espalier" else move.to
        there, moved, stays = _module(target), [], []
        for alias in node.names:
            if move.names is not None and alias.name not in move.names:
                stays.append(alias)
                continue
            self.systems.add(move.system)
            if (alias.name == "*" and there is not None) or _offers(move, module, there, alias.name):
                moved.append(alias)
                if (move.system, alias.name) == ("transformers", "Trainer"):
                    self.notes.append(Note(node.lineno, _TRAINER))
            else:
                stays.append(alias)
                self._missing(node.lineno, f"{module}.{alias.name}", move, _instead(there, alias.name))
        if moved:
            lines = [
                f"from {origin} import {', '.join(_as(a.name, a.asname) for a in names)}"
                for origin, names in ((target, moved), (module, stays))
                if names
            ]
            self._replace(node, lines)

    def _missing(self, line: int, name: str, move: _Move, instead: str = "") -> None:
        hint = next((text for known, text in _HINTS.items() if name.startswith(known)), instead or move.hint)
        self.notes.append(Note(line, f"{name} has no equivalent here{f': {hint}' if hint else ''}", True))

    def _last_import(self) -> int:
        lines = [0]
        for node in self.tree.body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
                lines.append(node.end_lineno or node.lineno)
        return max(lines)

    # ---- names in use

    def _use(self, node: ast.Attribute) -> None:
        """``deepspeed.zero.Init``, ``nn.DataParallel``: is it there, and where."""
        parts = _parts(node)
        if parts is None or parts[0] not in self.names:
            return
        name = ".".join([self.names[parts[0]], *parts[1:]])
        root = name.partition(".")[0]
        whole = _MOVES.get(root)
        if whole is not None and whole.names is None:
            here: Any = _module(whole.to)
            for i, part in enumerate(name.split(".")[1:], 2):
                if here is None or not _has(here, part):
                    self._missing(node.lineno, ".".join(name.split(".")[:i]), whole, _instead(here, part))
                    return
                here = getattr(here, part)
                if not isinstance(here, ModuleType):
                    return
            return
        module, _, last = name.rpartition(".")
        move = _MOVES.get(module)
        if move is None or (move.names is not None and last not in move.names):
            return
        self.systems.add(move.system)
        there = _module(move.to)
        if not _offers(move, module, there, last):
            self._missing(node.lineno, name, move)
        elif move.names is not None:
            self.wanted.add((move.to, last))
            self._replace(node, [last])
            if last == "Trainer":
                self.notes.append(Note(node.lineno, _TRAINER))

    # ---- calls

    def _call(self, node: ast.Call) -> None:
        parts = _parts(node.func)
        if parts is None or parts[0] not in self.names:
            return
        name = ".".join([self.names[parts[0]], *parts[1:]])
        if name == "deepspeed.initialize":
            for keyword in node.keywords:
                if keyword.arg in ("config", "config_params"):
                    self._configuration(keyword.value)
                elif keyword.arg in ("mpu", "mesh_param") and not _is_none(keyword.value):
                    reason = "the configuration, or plan={...}, says which axes there are"
                    is_missing = keyword.arg == "mesh_param"
                    told = "has no equivalent here" if is_missing else "is to say what the plan says"
                    self.notes.append(
                        Note(keyword.value.lineno, f"{keyword.arg}= {told}: {reason}", is_missing)
                    )
        if name.startswith("colossalai.booster.plugin."):
            self._plugin(node, name.rpartition(".")[2])
        if name in _LIGHTNINGS:
            self._strategy(node, _LIGHTNINGS[name])
        owner, theirs = _ARGUMENTS.get(name, ("", ()))
        for keyword in node.keywords:
            if keyword.arg in theirs and not _is_none(keyword.value):
                self._plan_instead(owner, str(keyword.arg), keyword.value)

    def _plugin(self, node: ast.Call, name: str) -> None:
        """What becomes of the arguments of a plugin of Colossal-AI's."""
        from espalier.compat.colossalai.booster import plugin

        kind = getattr(plugin, name, None)
        if not isinstance(kind, type) or not issubclass(kind, plugin.Plugin):
            return
        for keyword in node.keywords:
            if keyword.arg is None:  # **options
                continue
            line, value = self._literal(keyword.value)
            if (reason := kind.idle_because(keyword.arg)) is not None:
                self.notes.append(Note(line, f"{name}: {keyword.arg} has no effect: {reason}"))
            elif (mistake := kind.mistake_in(keyword.arg, value)) is not None:
                self.notes.append(Note(line, f"{name}: {mistake.text()}", True))

    def _strategy(self, node: ast.Call, move: _Move) -> None:
        """What Lightning is asked for by a name: a strategy of the plan that says so."""
        for keyword in node.keywords:
            name = self._literal(keyword.value)[1]
            if keyword.arg == "strategy" and name in _STRATEGIES:
                self.systems.add(move.system)
                self.wanted.add((move.to, "EspalierStrategy"))
                self._replace(keyword.value, [f"EspalierStrategy({_STRATEGIES[name]})"])

    def _plan_instead(self, owner: str, name: str, node: ast.expr) -> None:
        """An argument that asks another library for parallelism: the plan that says so."""
        remedy = (
            f"leave it out, and write {owner}(..., plan={_plan_of(name, self._literal(node)[1]) or '{...}'})"
        )
        self.notes.append(Note(node.lineno, f"{name}= has no equivalent here: {remedy}", True))

    def _literal(self, node: ast.expr) -> tuple[int, Any]:
        """The line of a value and what it is, or the file that it names; None where that is not seen."""
        if isinstance(node, ast.Name):
            node = self.tables.get(node.id, node)
        try:
            value = ast.literal_eval(node)
        except ValueError:
            return node.lineno, None
        is_file = isinstance(value, str) and (self.folder / value).is_file()
        return node.lineno, self.folder / value if is_file else value

    def _configuration(self, node: ast.expr) -> None:
        """A configuration of DeepSpeed's: what becomes of its keys."""
        from espalier.compat.deepspeed.config import examine, load

        line, setting = self._literal(node)
        if not isinstance(setting, Mapping | Path):
            return
        try:
            _, idle, mistakes = examine(load(setting))
        except MistakeError as error:
            idle, mistakes = [], [*error.mistakes]
        self.notes += [Note(line, f"configuration: {m.text()}", True) for m in mistakes]
        self.notes += [
            Note(line, f"configuration: {k.name} has no effect: {k.reason.replace('`', '')}") for k in idle
        ]

    # ---- text

    def _replace(self, node: ast.stmt | ast.expr, lines: list[str]) -> None:
        indent = "\n" + " " * node.col_offset
        end = node.end_lineno or node.lineno, node.end_col_offset or 0
        self.edits.append(_Edit((node.lineno, node.col_offset), end, indent.join(lines)))

    def _edited(self) -> str:
        lines = [line.encode() for line in self.source.splitlines(keepends=True)]
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        text = b"".join(lines)
        for edit in sorted(set(self.edits), reverse=True):
            first, last = (starts[line - 1] + byte for line, byte in (edit.start, edit.end))
            text = text[:first] + edit.text.encode() + text[last:]
        return text.decode()


def _plan_of(name: str, setting: Any) -> dict[str, Any]:
    """What an argument of transformers' asks of the data axis, as keys of a plan."""
    from espalier.compat.deepspeed.config import examine, load

    if name == "fsdp" and isinstance(setting, str | list):
        words = setting.split() if isinstance(setting, str) else setting
        stages = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2}
        plan: dict[str, Any] = next(({"zero": stages[word]} for word in words if word in stages), {})
        cut = ("parameters", "gradients", "states")
        return plan | ({"offload": dict.fromkeys(cut, "host")} if plan and "offload" in words else {})
    if name != "deepspeed" or not isinstance(setting, Mapping | Path):
        return {}
    try:
        values, *_ = examine(load(setting))
    except MistakeError:
        return {}
    plan, places = {"zero": values.get("zero_optimization.stage", 0)}, {"cpu": "host", "nvme": "disk"}
    away = {
        kind: places[device]
        for kind, of in (("parameters", "param"), ("states", "optimizer"))
        if (device := values.get(f"zero_optimization.offload_{of}.device")) in places
    }
    return plan | ({"offload": away} if away else {})


def _move(module: str) -> tuple[_Move | None, str]:
    """How a module's names move, and the rest of its path."""
    if module in _MOVES:
        return _MOVES[module], ""
    root, _, rest = module.partition(".")
    move = _MOVES.get(root)
    return (move, f".{rest}") if move is not None and move.names is None else (None, "")


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _has(module: Any, name: str) -> bool:
    if hasattr(module, name):
        return not isinstance(getattr(module, name), Absent | AbsentModule)
    return isinstance(module, ModuleType) and _module(f"{module.__name__}.{name}") is not None


def _offers(move: _Move, module: str, there: ModuleType | None, name: str) -> bool:
    """Whether a name of a module is there, and is what it was: a module here may hand on what it has not."""
    if f"{module}.{name}" in _HINTS:
        return False
    return name in move.known or (there is not None and _has(there, name))


def _instead(module: Any, name: str) -> str:
    """What to do in place of a name that a module has not."""
    there = getattr(module, name, None)
    return there.instead if isinstance(there, Absent | AbsentModule) else ""


def _as(name: str, other: str | None) -> str:
    return name if other in (None, name) else f"{name} as {other}"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _parts(node: ast.expr) -> list[str] | None:
    """The names of ``a.b.c``; None of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def _chains(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The longest ``a.b.c`` at each place."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield node
