"""The ways to train in parallel, each a table of layouts, and the plan that names a mix of them."""

from typing import TYPE_CHECKING

from espalier.later import on_use
from espalier.parallel.plan import Plan, PlanError

if TYPE_CHECKING:
    from espalier.parallel.branches import everywhere
    from espalier.parallel.compose import Arrangement, arrange, lay_out_model
else:
    __getattr__ = on_use(__name__, {"branches": "everywhere", "compose": "Arrangement arrange lay_out_model"})

__all__ = ["Arrangement", "Plan", "PlanError", "arrange", "everywhere", "lay_out_model"]
