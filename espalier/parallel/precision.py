"""The part of a plan that says in which dtypes it computes. Data, like the plan."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Precision(BaseModel):
    """In which dtypes a plan computes; a lone string is ``compute``.

    Attributes:
        compute: ``"float32"`` casts nothing: parameters are as given. With ``"bfloat16"`` the model computes
            in parameters of that dtype, and the optimizer updates float32 masters of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    compute: Literal["float32", "bfloat16"] = "float32"

    @property
    def parameters(self) -> str | None:
        """The dtype to which parameters are cast; None where they stay as given."""
        return None if self.compute == "float32" else self.compute

    def __str__(self) -> str:
        return self.compute


def as_precision(given: Any) -> Any:
    """A lone string as the table that it stands for; the rest as it is."""
    return {"compute": given} if isinstance(given, str) else given
