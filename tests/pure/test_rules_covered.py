"""No rule without a case in the brute force."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from espalier.device import MOVES
from espalier.sharding.spec import rule
from espalier.tensor import rules
from espalier.tensor.fallback import function_of
from espalier.tensor.flex_attention import _attended
from espalier.tensor.rules import RULES, pointwise
from espalier.tensor.rules.float8 import float8_linear
from espalier.tensor.rules.pointwise import nonlinear
from tests.ranks.brute import name_of
from tests.ranks.cases import CASES
from tests.ranks.ours import ruled_names

# distinct public functions of torch with a rule of their own
LEAST = 500


def test_every_ruled_function_has_a_case():
    tried = {id(f): f for group in CASES.values() for of in group for f in of.functions}
    functions = list(tried.values())
    # moving to an accelerator is tried in tests/gpu
    functions += [getattr(torch.Tensor, name) for name in MOVES if name != "cpu"]
    # flex_attention, whose arguments are functions, in tests/ranks/test_functions.py
    functions.append(_attended)
    # float8_linear, whose rounding depends on what a rank holds, in tests/ranks/test_float8.py
    functions.append(float8_linear)
    # those of libraries are in the table where a test has met them
    missing = [name_of(f) for f in RULES.functions() if f not in functions and not _is_of_library(f)]
    assert not missing, f"give these a case in tests/ranks/cases: {', '.join(missing)}"


def _is_of_library(function: Callable[..., Any]) -> bool:
    owner = function_of(function)
    return owner is not None and not owner.__module__.startswith(("torch", "espalier"))


def test_so_many_public_functions_have_rules():
    names = ruled_names()
    assert len(names) >= LEAST, f"{len(names)} functions have rules: {' '.join(sorted(names))}"


def test_what_goes_element_by_element_is_no_function_of_matrices(monkeypatch):
    """torch 2.14 has a further function named ``polar``, in ``torch.linalg``."""
    monkeypatch.setattr(torch.linalg, "polar", lambda matrix: matrix, raising=False)
    named = f"{pointwise.NONLINEAR} {pointwise.BROADCAST} {pointwise.LINEAR}".split()
    assert [name for name in named if hasattr(torch.linalg, name)] == []
    assert RULES.get(torch.polar) is nonlinear


def test_every_file_of_rules_is_imported():
    files = [file.name for file in pkgutil.iter_modules(rules.__path__)]
    assert "views" in files and not [name for name in files if name not in vars(rules)]


def test_two_files_cannot_both_have_a_rule_for_a_function():
    with pytest.raises(AssertionError, match=r"rules.pointwise has a rule for .*rules.rows another"):
        rule("flip")(nonlinear)
    with pytest.raises(AssertionError, match="torch has no flap"):
        rule("flap")(nonlinear)
    assert RULES.get(torch.flip).__module__ == "espalier.tensor.rules.rows"
