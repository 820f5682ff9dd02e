"""The part of a plan that says where state lies between its uses. Data, like the plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Place = Literal["device", "host", "disk"]


class Share(BaseModel):
    """Where a part of one kind of state lies; a lone string is ``place``.

    Attributes:
        place: ``"device"``, ``"host"`` (pinned memory, where there is a device), ``"disk"``; ``"auto"``
            stands for ``{place = "host", ratio = "auto"}``.
        ratio: the share of the chunks' bytes that lies there; the rest is on the device. ``"auto"``: what
            does not fit below ``budget_gigabytes``, as the first steps show.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    place: Place = "device"
    ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 1.0


def as_share(given: Any) -> Any:
    """A lone string as the table that it stands for; the rest as it is."""
    if given == "auto":
        return {"place": "host", "ratio": "auto"}
    return {"place": given} if isinstance(given, str) else given


Where = Annotated[Share, BeforeValidator(as_share)]


class Offload(BaseModel):
    """Where parameters, gradients and states lie between their uses: a residency for each kind.

    Attributes:
        parameters: this rank's pieces of the parameters.
        gradients: this rank's pieces of the finished gradients.
        states: the optimizer's states, and master copies of low-precision parameters.
        directory: for what is on disk. Each rank makes a folder of its own in there, which is removed at
            the end.
        budget_gigabytes: of the device's memory (10^9 bytes), for kinds whose ratio is ``"auto"``: states
            are kept on the device first, then gradients and parameters, as far as they fit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parameters: Where = Share()
    gradients: Where = Share()
    states: Where = Share()
    directory: str | None = None
    budget_gigabytes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def shares(self) -> dict[str, Share]:
        """The residency of each kind."""
        return {"states": self.states, "gradients": self.gradients, "parameters": self.parameters}

    @model_validator(mode="after")
    def _fits(self) -> Offload:
        shares = self.shares.values()
        if any(s.place == "disk" for s in shares) and self.directory is None:
            raise ValueError("what is on disk needs a folder there: directory = ...")
        auto = any(s.ratio == "auto" for s in shares)
        if auto and self.budget_gigabytes is None:
            raise ValueError("a ratio is auto, which needs budget_gigabytes = ...")
        if self.budget_gigabytes is not None and not auto:
            raise ValueError('budget_gigabytes is for a ratio that is auto: states = "auto", say')
        return self

    def __str__(self) -> str:
        away = [(kind, s) for kind, s in self.shares.items() if s.place != "device"]
        return ", ".join(f"{kind} on {s.place}{_part(s)}" for kind, s in away)


def _part(share: Share) -> str:
    if share.ratio == "auto":
        return " as needed"
    return "" if share.ratio == 1 else f" ({share.ratio:.0%})"
