"""The ways to train in parallel, each a table of layouts, and the plan that names a mix of them."""

from espalier.parallel.branches import everywhere
from espalier.parallel.compose import Arrangement, arrange, lay_out_model
from espalier.parallel.plan import Plan, PlanError

__all__ = ["Arrangement", "Plan", "PlanError", "arrange", "everywhere", "lay_out_model"]
