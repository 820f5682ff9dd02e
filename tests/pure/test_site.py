"""The documentation as a site: built as `make docs` builds it, and looked at in a real browser, from disk."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.pure.browsing import all_of, opened, violations

ROOT = Path(__file__).parent.parent.parent
# of each kind: the home page with its tables, one of tasks with code, names from docstrings
LOOKED_AT = ("index", "two-machines", "api/looking")
TAB, ENTER = "\ue004", "\ue007"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder; where mkdocs is not installed these tests are skipped."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs mkdocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page links to or loads, and what in it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value is not None:
                self.targets.append(value)


def test_no_link_is_dead_and_nothing_is_loaded_from_a_network(site: Path) -> None:
    """Links, pictures, scripts and styles of all pages; a link to another site is one that people click."""
    paths = [path for path in site.rglob("*.html") if path.name != "404.html"]  # its links begin at the root
    pages = {path.resolve(): Page(path) for path in paths}
    assert len(pages) > 40
    dead = [
        f"{path.relative_to(site)}: {t}" for path, page in pages.items() for t in missing(path, page, pages)
    ]
    assert dead == []


def missing(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """The targets of a page that are not there."""
    for target in page.targets:
        parts = urlsplit(target)
        if parts.scheme in ("http", "https", "mailto", "data"):
            continue
        there = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
        there = there / "index.html" if there.is_dir() else there
        anchor = unquote(parts.fragment)
        if not there.is_file() or (anchor and there in pages and anchor not in {"", *pages[there].anchors}):
            yield target


def opened_still(browser: Any, path: Path) -> None:
    """Open a page on which nothing is on its way from one look to another."""
    opened(browser, path)
    browser.execute_script(
        "const style = document.createElement('style');"
        "style.textContent = '* { transition: none !important }';"
        "document.head.append(style)"
    )


def test_the_pages_in_a_browser(site: Path, browser: Any) -> None:
    """No error, enough contrast in both themes, names for all that can be used; all comes from disk."""
    for name in LOOKED_AT:
        opened_still(browser, site / f"{name}.html")
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert [url for url in loaded if not url.startswith(("file:", "data:", "blob:"))] == []
        for scheme in ("default", "slate"):
            browser.execute_script(f"document.body.dataset.mdColorScheme = '{scheme}'")
            assert violations(browser) == [], (name, scheme)
        assert browser.get_log("browser") == [], name


def test_the_site_without_a_mouse(site: Path, browser: Any) -> None:
    """The first Tab offers to skip what stands on all pages; a search finds a page, and Enter opens it."""
    opened_still(browser, site / "index.html")
    browser.switch_to.active_element.send_keys(TAB)
    skip = browser.switch_to.active_element
    assert "md-skip" in skip.get_attribute("class") and skip.value_of_css_property("opacity") == "1"
    skip.send_keys(ENTER)
    assert browser.current_url.endswith(skip.get_attribute("href").rpartition("/")[2])
    opened(browser, site / "resume.html")
    all_of(browser, "body")[0].send_keys("/")
    browser.switch_to.active_element.send_keys("two machines")
    browser.implicitly_wait(20)
    found = browser.find_element("css selector", ".md-search-result__link")
    browser.implicitly_wait(0)
    assert "two-machines.html" in found.get_attribute("href")
    support = pytest.importorskip("selenium.webdriver.support.ui")

    def there(browser: Any) -> bool:
        # what is found is shown while one types: one Enter may come too soon
        browser.switch_to.active_element.send_keys(ENTER)
        return "two-machines.html" in browser.current_url

    support.WebDriverWait(browser, 20).until(there)
    assert browser.get_log("browser") == []


def test_what_is_searched_tells_of_things(site: Path) -> None:
    """Programs and changes name everything, and would come before the pages that explain it."""
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"resume.html", "data-axis.html", "commands.html", "api/looking.html"} <= pages
    assert [page for page in pages if page.startswith(("source/", "changelog"))] == []
