"""The language of sharding rules, which knows no rule: what a rule says, and what follows from it.

A rule is a Python function with the parameters of the torch function that it speaks for. ``spec`` has what it
gives, and the table that it stands in; ``solve`` the layouts that follow, and why a call costs what it does.
"""

from espalier.sharding.solve import solve
from espalier.sharding.spec import RULES, Operand, Placed, Spec

__all__ = ["RULES", "Operand", "Placed", "Spec", "solve"]
