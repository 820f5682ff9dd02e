"""What tests ask of a page in a browser (the fixture ``browser``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def opened(browser: Any, path: Path) -> None:
    browser.get(path.as_uri())
    assert browser.get_log("browser") == []


def all_of(browser: Any, selector: str) -> list[Any]:
    found: list[Any] = browser.find_elements("css selector", selector)
    return found


def violations(browser: Any) -> list[str]:
    """What axe-core finds wrong for people who use keyboards, screen readers, or see little contrast."""
    axe = pytest.importorskip("axe_core_python")
    browser.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = browser.execute_async_script("axe.run().then(arguments[0])")["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html'][:120]}" for v in found]
