"""Programs as researchers write them: small, whole, and in none of them a word of parallelism.

Each is a module that gives its loss, or a module of several parts and a loop over them (``loop``).
"""

from tests.zoo.programs import learning, physics, structures
from tests.zoo.programs.entry import PROGRAMS, case

__all__ = ["PROGRAMS", "case", "learning", "physics", "structures"]
