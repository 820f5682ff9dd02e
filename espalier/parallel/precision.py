"""The part of a plan that says in which dtypes it computes. Data, like the plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LossScale(BaseModel):
    """How the loss is scaled in float16, so that small gradients don't vanish; named as in GradScaler.

    Attributes:
        init_scale: the first scale.
        growth_factor: it grows by this after ``growth_interval`` steps without an overflow.
        backoff_factor: it shrinks by this where a gradient overflows; that step is skipped.
        growth_interval: see ``growth_factor``.
        min_scale: below it training ends with an error, which names the parameters that overflowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1)] = 2000
    min_scale: Positive = 1.0


class Precision(BaseModel):
    """In which dtypes a plan computes, sends gradients and updates; a lone string is ``compute``.

    Attributes:
        compute: ``"float32"`` casts nothing: parameters are as given. With ``"bfloat16"`` and ``"float16"``
            the model computes in parameters of that dtype, and the optimizer updates float32 masters of
            them. With ``"autocast-bfloat16"`` and ``"autocast-float16"`` the parameters stay as given and
            the forward pass runs under ``torch.autocast``.
        reduce: the dtype in which gradients travel and are summed; by default the parameters' own.
        loss_scale: settings of the loss scaling that every form of float16 has.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    compute: Literal["float32", "bfloat16", "float16", "autocast-bfloat16", "autocast-float16"] = "float32"
    reduce: Literal["float32", "bfloat16", "float16"] | None = None
    loss_scale: LossScale = LossScale()

    @property
    def parameters(self) -> str | None:
        """The dtype to which parameters are cast; None where they stay as given."""
        return self.compute if self.compute in ("bfloat16", "float16") else None

    @property
    def autocast(self) -> str | None:
        """The dtype of ``torch.autocast``; None where it is off."""
        way, _, dtype = self.compute.partition("-")
        return dtype if way == "autocast" else None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.compute in ("float16", "autocast-float16")

    def __str__(self) -> str:
        return self.compute if self.reduce is None else f"{self.compute}, reduced in {self.reduce}"


def as_precision(given: Any) -> Any:
    """A lone string as the table that it stands for; the rest as it is."""
    return {"compute": given} if isinstance(given, str) else given
