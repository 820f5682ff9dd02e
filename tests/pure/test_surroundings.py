"""What a compiled region hangs on beside its arguments: changes are seen, and nothing else is one."""

from __future__ import annotations

import pytest
from torch import nn

from espalier.tensor.surroundings import Surroundings, watched


def test_changes_are_seen() -> None:
    module = nn.Linear(2, 2)
    module.names, module.table, module.rate = ["a"], {}, 0.5  # type: ignore[assignment]
    around = Surroundings(list(watched(module, {})))
    assert around.are_same()
    module.eval()
    assert not around.are_same()
    module.train()
    hook = module.register_forward_hook(lambda *_: None)
    assert not around.are_same()
    hook.remove()
    assert around.are_same()
    for change in (lambda: module.names.append("b"), lambda: module.table.update(b=1)):  # type: ignore
        change()
        assert not around.are_same()
        module.names, module.table = ["a"], {}  # type: ignore[assignment]
        assert around.are_same()
    module.table["b"] = 1  # type: ignore
    assert not around.are_same()  # though others are new objects by now
    module.table = {}  # type: ignore[assignment]
    module.rate = float("0.5")  # type: ignore[assignment]
    assert around.are_same()
    module.rate = 1  # type: ignore[assignment]
    assert not around.are_same()
    del module.rate
    assert not around.are_same()
    module.other = 1  # type: ignore[assignment]
    with pytest.raises(KeyError):
        around.are_same()
