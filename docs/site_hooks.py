"""What the site needs beside the pages of this folder; mkdocs calls the functions named ``on_...``.

The README is the home page. A file of the repository that a page links to becomes a page, too, so that no
link leads out of the site. The command line's own help makes the page of all commands.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

import griffe
import typer
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
HOME = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
# of pages that name everything: who searches wants those that tell of it
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+):(?= )(.*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Docstrings as they are written here, made into what griffe reads."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Roles, as in :class:`Plan`, become code; arguments of which one line speaks get a line each."""
        if obj.docstring:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _SEVERAL.sub(
                lambda line: "\n".join(f"{line[1]}{name}:{line[3]}" for name in line[2].split(", ")), text
            )

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """A class that is made by ``__new__`` has its arguments from there."""
        if "__init__" not in cls.members and "__new__" in cls.members:
            cls.members["__init__"] = cls.members["__new__"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of this folder is."""
    texts = {uri: (ROOT / name).read_text("utf-8") for name, uri in HOME.items()}
    for name in [*HOME, *(f"docs/{uri}" for uri in files.src_uris if uri.endswith(".md"))]:
        for link in _LINK.findall((ROOT / name).read_text("utf-8")):
            path = normpath(f"{name}/../{link}")
            if target(path).startswith("source/") and (ROOT / path).exists():
                texts[target(path)] = source(path)
    texts["commands.md"] = commands()
    texts["changelog.md"] = UNSEARCHED + texts["changelog.md"]
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages."""
    uri = page.file.src_uri
    here = {there: name for name, there in HOME.items()}.get(uri, f"docs/{uri}")

    def moved(link: re.Match[str]) -> str:
        path = normpath(f"{here}/../{link[1]}")
        return relpath(target(path), uri.rpartition("/")[0] or ".")

    return markdown if uri.startswith("source/") else _LINK.sub(moved, markdown)


def target(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return HOME.get(path, f"source/{path}.md")


def source(name: str) -> str:
    """A page with a file of the repository, or with all of a folder."""
    path = ROOT / name
    texts = [UNSEARCHED, f"# {name}\n"]
    for file in [path] if path.is_file() else sorted(path.glob("*.py")):
        texts += [f"## {file.name}\n"] if path.is_dir() else []
        texts += [
            f"````{file.suffix.removeprefix('.') or 'text'}\n{file.read_text('utf-8').rstrip()}\n````\n"
        ]
    return "\n".join(texts)


def commands() -> str:
    """A page with what ``espalier COMMAND --help`` says, of all commands."""
    from espalier.cli import app

    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="espalier")
    texts = ["# All commands and options\n"]
    texts += ["This is their own help. [The command line](command-line.md) has examples, and the job file.\n"]
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        inner = typer.Context(command, info_name=name, parent=context)
        texts += [
            f"## espalier {name}\n",
            f"    espalier {name} {' '.join(command.collect_usage_pieces(inner))}\n",
        ]
        texts += [f"{command.help}\n", "| argument | |", "|---|---|"]
        for parameter in command.params:
            if row := parameter.get_help_record(inner):
                texts.append("| " + " | ".join(cell(part, code=not at) for at, part in enumerate(row)) + " |")
        texts.append("")
    return "\n".join(texts)


def cell(text: str, *, code: bool) -> str:
    """As a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|").replace("[", "\\[")
    return f"`{text}`" if code else text
