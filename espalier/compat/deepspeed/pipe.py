"""``deepspeed.pipe``: a model as a list of layers, whose stages the plan makes, and its engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.config import Config
from espalier.compat.deepspeed.engine import DeepSpeedEngine
from espalier.compat.deepspeed.groups import init_distributed
from espalier.compat.deepspeed.topologies import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    topology_of,
)
from espalier.mesh.process import running_size
from espalier.parallel import Plan
from espalier.texts import MistakeError


class LayerSpec:
    """A layer that is built where it is needed.

    Args:
        typename: its class.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ValueError(f"LayerSpec: expected a class of torch.nn.Module, got {typename!r}.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{k}={v!r}" for k, v in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that is the same, parameters included, wherever its key stands.

    Args:
        key: names it.
        forward_fn: ``forward_fn(layer, x)`` is called in its place here.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


# of DeepSpeed's class, and what to do in its place
_INSTEAD: Final = MappingProxyType(
    {
        **dict.fromkeys(
            ("ckpt_layer_path", "ckpt_layer_path_list", "ckpt_prefix", "load_state_dir", "save_state_dict"),
            "engine.save_checkpoint and load_checkpoint take layers along, from any number of stages",
        ),
        **dict.fromkeys(
            ("allreduce_tied_weight_gradients", "get_tied_weights_and_groups"),
            "gradients of tied layers are summed by the engine",
        ),
        **dict.fromkeys(
            ("partitions", "stage_owner"),
            "the engine cuts where the plan says, or balances: engine.engine.stages tells what is where",
        ),
        "get_additional_losses": "add them up in the model, or in loss_fn",
    }
)


class PipelineModule(nn.Module):
    """Layers one after the other, which ``initialize`` puts on ``num_stages`` ranks, or groups of them.

    It is a plain model: it runs on one process too, all layers are built on each rank (under
    ``deepspeed.zero.Init()`` without memory), and ZeRO of any stage goes with it.

    Args:
        layers: modules, :class:`LayerSpec` and functions of one value; or an ``nn.Sequential``.
        num_stages: of the pipeline.
        topology: DeepSpeed's; its ``pipe`` is the number of stages, and layers are cut over its ``model``.
        loss_fn: ``loss_fn(output, labels)``.
        partition_method: ``"uniform"`` and ``"type:REGEX"`` cut as DeepSpeed does, where layers that are
            modules of their own stand at the cuts; with ``"parameters"`` and ``"best"`` the engine balances.
        activation_checkpoint_interval: above 0, layers are computed again in the backward pass.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Any = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise ValueError("PipelineModule needs num_stages=..., or topology=...")
        self.num_stages: int = int(num_stages or 1) if topology is None else topology.get_dim("pipe")
        self.tensor_size: int | None = None if topology is None else topology.get_dim("model") or None
        self._topology: ProcessTopology | None = topology
        self._grid: PipelineParallelGrid | None = None
        self.loss_fn, self.partition_method = loss_fn, partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.tied_modules = nn.ModuleDict()
        self._calls: list[tuple[str, Callable[..., Any] | None]] = []  # of a module, by name, or a function
        self._kinds: list[str] = []
        for i, layer in enumerate(layers):
            self._kinds.append(getattr(layer, "typename", type(layer)).__name__)
            if seed_layers:
                torch.manual_seed(base_seed + i) if seed_fn is None else seed_fn(base_seed + i)
            self._add(str(i), layer)

    def _add(self, name: str, layer: Any) -> None:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            self._calls.append((f"tied_modules.{layer.key}", layer.forward_fn))
            return
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module):
            self.add_module(name, built)
            self._calls.append((name, None))
        elif callable(built):
            self._calls.append(("", built))
        else:
            raise ValueError(f"Layer {name}: expected a module, a LayerSpec or a function, got {layer!r}.")

    def forward(self, *inputs: Any) -> Any:
        """All layers."""
        x = inputs[0] if len(inputs) == 1 else inputs
        for name, function in self._calls:
            module = self.get_submodule(name) if name else None
            if module is None:
                assert function is not None
                x = function(x)
            else:
                x = module(x) if function is None else function(module, x)
        return x

    def arranged(self, settings: Config) -> Config:
        """A configuration with what this model says of its stages.

        Raises:
            ValueError: ``partition_method`` is unknown, or cuts more stages than there are layers; or ranks
                lie otherwise in the plan than in the topology that was given.
        """
        self._topology, self._grid = topology_of(settings.plan, self._topology), None
        more: dict[str, Any] = {}
        if self.num_stages > 1 and (cuts := self._cuts()) is not None and settings.plan.cuts is None:
            more["cuts"] = cuts
        if self.activation_checkpoint_interval and settings.plan.recompute == "none":
            more["recompute"] = "full"
        if not more:
            return settings
        return replace(settings, plan=Plan(**{**settings.plan.model_dump(), **more}))

    def _cuts(self) -> list[str] | None:
        """The modules at which stages begin, as DeepSpeed cuts; None where the engine is to balance."""
        kind, _, pattern = self.partition_method.partition(":")
        kind = kind.lower()
        if kind == "uniform":
            weights = [1] * len(self._calls)
        elif kind == "type":
            weights = [int(bool(re.search(pattern, name, re.IGNORECASE))) for name in self._kinds]
        elif kind in ("parameters", "best"):
            return None
        else:
            expected = "expected parameters, uniform, best or type:REGEX"
            raise MistakeError("PipelineModule", [("partition_method", self.partition_method, expected)])
        if sum(weights) < self.num_stages:
            expected = f"finds {sum(weights)} layer(s) for {self.num_stages} stages"
            raise MistakeError("PipelineModule", [("partition_method", self.partition_method, expected)])
        first = _starts(weights, self.num_stages)
        names = [self._calls[i][0] for i in first]
        own = all(name and not name.startswith("tied_modules.") for name in names)
        return names if own else None

    def topology(self) -> ProcessTopology:
        """The grid of ranks: that which was given, behind ``initialize`` that of the plan; before it, with as
        many copies of the pipeline as there are ranks for.

        Raises:
            ValueError: the number of ranks is no multiple of that of stages.
        """
        if self._topology is None:
            init_distributed()
            copies, rest = divmod(running_size(), self.num_stages)
            if rest:
                raise ValueError(
                    f"PipelineModule(num_stages={self.num_stages}): expected a divisor of the number of "
                    f"ranks, of which there are {running_size()}."
                )
            self._topology = PipeDataParallelTopology(self.num_stages, copies)
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank in it, and its groups."""
        if self._grid is None:
            self._grid = PipelineParallelGrid(self.topology())
        return self._grid

    def __getattr__(self, name: str) -> Any:
        if name in _INSTEAD:
            raise AttributeError(f"DeepSpeed's PipelineModule.{name} is not there: {_INSTEAD[name]}.")
        return super().__getattr__(name)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Before ``initialize``: above 0, layers are computed again in the backward pass."""
        self.activation_checkpoint_interval = interval

    def num_pipeline_stages(self) -> int:
        """How many there are."""
        return self.num_stages


def _starts(weights: list[int], stages: int) -> list[int]:
    """Where all stages but the first begin, so that they weigh about the same."""
    total, seen = sum(weights), 0
    starts: list[int] = []
    for i, weight in enumerate(weights):
        if weight and len(starts) < stages - 1 and seen >= (len(starts) + 1) * total / stages:
            starts.append(i)
        seen += weight
    return starts


class PipelineEngine(DeepSpeedEngine):
    """Trains by :meth:`train_batch`; ``forward``, ``backward`` and ``step`` are the pipeline's own.

    Attributes:
        grid, mpu: this rank's place among the ranks of the plan, and its groups.
    """

    _batches: Iterator[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mpu = self.grid = cast("PipelineModule", self.module).mpu()
        self.is_pipe_parallel = self.grid.pipe_parallel_size > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.gradient_accumulation_steps()

    @property
    def num_stages(self) -> int:
        """Of the pipeline."""
        return int(self.plan.pipe)

    @property
    def stage_id(self) -> int:
        """This rank's."""
        mesh = self.engine.mesh
        return mesh.coordinate[mesh.axis("pipe")] if self.num_stages > 1 else 0

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def reset_activation_shape(self) -> None:
        """Nothing: stages tell each other the shapes of every micro-batch that is of another."""

    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank holds the last layers."""
        return self.stage_id == self.num_stages - 1

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Train on this."""
        self.training_dataloader: Any = loader
        self._batches = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Train on what this gives."""
        self._batches = iterator

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Forward, backward, step on as many micro-batches as make a step.

        Args:
            data_iter: gives pairs ``(inputs, labels)`` of this rank's rows; every rank needs one, those of
                the inner stages too. By default the loader of ``training_data``, over and over.

        Returns:
            the mean of the micro-batches' losses, over all ranks.
        """
        parts = self._parts(data_iter, self.micro_batches)
        self.tput_timer.start()
        self.engine.accumulate(parts)
        self._applied = self.engine.step()
        self.micro_steps += self.micro_batches
        loss = self.engine.loss
        assert loss is not None
        self._losses.append(loss)
        self._after_step()
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The loss of micro-batches, or the outputs of this rank's rows, on every rank.

        Args:
            return_logits: give both.
            compute_loss: else the outputs alone: a list, or, averaged, one.
        """
        was, parts = self.module.training, self._parts(data_iter, num_micro_batches or self.micro_batches)
        self.eval()
        try:
            loss = self.engine.evaluate(parts) if compute_loss else None
            if compute_loss and not return_logits:
                return loss
            outputs = [self.engine.outputs(part[0], "own") for part in parts]
        finally:
            self.train(was)
        if not compute_loss:
            return outputs if reduce_output is None else torch.stack(outputs).mean(0)
        return loss, outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _parts(self, data_iter: Iterator[Any] | None, count: int) -> list[Any]:
        if data_iter is None:
            if self._batches is None:
                if self.training_dataloader is None:
                    raise ValueError(
                        "This rank has no data: every rank, also of the inner stages, needs data_iter, or "
                        "training_data= for deepspeed.initialize."
                    )
                self._batches = _over_and_over(self.training_dataloader)
            data_iter = self._batches
        return [self.engine.local_batch(tuple(next(data_iter))) for _ in range(count)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused while gradients are taken: the stages pass micro-batches together."""
        if torch.is_grad_enabled():
            raise ValueError(
                "A pipeline trains by engine.train_batch(data_iter), all micro-batches together."
            )
        return super().forward(*args, **kwargs)


def _over_and_over(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


__all__ = ["LayerSpec", "PipelineEngine", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.pipe",
    {
        "schedule": 'plan={"schedule": name} of deepspeed.initialize says it: espalier schedules shows them',
        "dualpipev DualPipeVModule": 'plan={"schedule": "dualpipe-v"} says it of a PipelineModule',
        "p2p": "stages send by the engine; torch.distributed has send and recv",
        "PipelineError": "errors of a pipeline are ValueError",
        "is_even": "it is DeepSpeed's own: leave it out",
    },
    elsewhere={"engine module": __name__, "topology": "espalier.compat.deepspeed.topologies"},
)
