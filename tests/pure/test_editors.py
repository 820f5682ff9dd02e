"""What an editor offers while a script is written: jedi, which also completes in notebooks and prompts.

What type checkers see is in ``typed.py``.
"""

from __future__ import annotations

import pytest

import espalier

jedi = pytest.importorskip("jedi", reason="needs jedi: pip install jedi")

SCRIPT = """
import espalier
from torch import nn
engine = espalier.initialize(nn.Linear(2, 2), None, espalier.Plan(data=2))
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("espalier.", set(espalier.__all__)),
        ("espalier.Plan(ze", {"zero="}),
        ("espalier.initialize(nn.Linear(2, 2), lo", {"loss_fn="}),
        ("engine.", {"backward", "step", "save", "load", "memory"}),
    ],
)
def test_it_completes(typed: str, offered: set[str]) -> None:
    lines = (SCRIPT + typed).splitlines()
    found = jedi.Script("\n".join(lines)).complete(len(lines), len(lines[-1]))
    assert offered <= {each.name for each in found}
