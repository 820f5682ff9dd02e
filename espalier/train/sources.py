"""Documents out of files: text, JSONL, Parquet, folders of ``datasets``; and which letters are learned.

A document is read when it is its turn; no more than a few are in memory.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from espalier.train.sections import Format, Source

_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_PATTERNS = ("*.py", "*.txt", "*.md", "*.jsonl", "*.json", "*.parquet", "*.bin", "*.npy")
_ENDINGS: tuple[tuple[str, Format], ...] = (
    (".jsonl", "jsonl"),
    (".json", "jsonl"),
    (".parquet", "parquet"),
    (".bin", "tokens"),
    (".npy", "tokens"),
)


class Document(NamedTuple):
    """A text.

    Attributes:
        text: all of it.
        learned: where what is learned begins and ends, in letters; None for all.
        ends: whether a token that says so follows.
    """

    text: str
    learned: tuple[tuple[int, int], ...] | None = None
    ends: bool = True


class Files(NamedTuple):
    """What a source is read from.

    Attributes:
        paths: files, in the order of their names; for "datasets" the folder alone.
        format: of all of them.
        size: their bytes.
    """

    paths: list[Path]
    format: Format
    size: int


def files_of(part: Source) -> Files:
    """The files of a source.

    Raises:
        ValueError: there are none, or of several formats.
    """
    root = Path(sysconfig.get_path("stdlib")) if part.source == "stdlib" else Path(part.source)
    if not root.exists():
        raise ValueError(f"data.source = {part.source!r} is neither a file nor a folder")
    if part.format == "datasets" or (part.format == "auto" and _is_dataset(root)):
        return Files([root], "datasets", sum(x.stat().st_size for x in root.rglob("*.arrow")))
    pairs, pattern = _matching(root, part)
    kinds = {_format(path) if part.format == "auto" else part.format for path in pairs}
    if len(kinds) > 1:
        several = " and ".join(sorted(kinds))
        raise ValueError(
            f"data.source = {part.source!r} holds {several} files: say which, data.pattern = ..."
        )
    form = kinds.pop() if kinds else "text"
    # records are counted as they are read, whole files here
    most = part.max_bytes if form == "text" else None
    paths = _select(pairs, most)
    if not paths:
        limit = "" if part.max_bytes is None else f" within data.max_bytes = {part.max_bytes}"
        raise ValueError(f"data.source = {part.source!r} has no text in files like {pattern!r}{limit}")
    return Files(paths, form, sum(path.stat().st_size for path in paths))


def _is_dataset(root: Path) -> bool:
    return root.is_dir() and any((root / x).is_file() for x in ("dataset_info.json", "dataset_dict.json"))


def _format(path: Path) -> Format:
    return next((form for ending, form in _ENDINGS if path.name.endswith(ending)), "text")


def _matching(root: Path, part: Source) -> tuple[list[Path], str]:
    """The files, by the names they have below the source, and the pattern of these."""
    if root.is_file():
        return [root], root.name
    if part.source == "stdlib":
        below = root.rglob("*.py")
        kept = [p for p in below if p.is_file() and not _SKIPPED & set(p.relative_to(root).parts)]
        return sorted(kept, key=lambda p: p.relative_to(root).as_posix()), "*.py"
    for pattern in [part.pattern] if part.pattern is not None else _PATTERNS:
        files = [p for p in root.rglob(pattern) if p.is_file()]
        if files:
            return sorted(files, key=lambda p: p.relative_to(root).as_posix()), pattern
    return [], part.pattern or ", ".join(_PATTERNS)


def _select(paths: Iterable[Path], max_bytes: int | None) -> list[Path]:
    chosen, total = [], 0
    for path in paths:
        size = path.stat().st_size
        if size and (max_bytes is None or total + size <= max_bytes):
            chosen.append(path)
            total += size
    return chosen


def documents(part: Source, files: Files, template: Template | None) -> Iterator[Document]:
    """The documents of a source, in order.

    Args:
        template: makes text of conversations.

    Raises:
        ValueError: a record lacks a column, or holds something else there.
    """
    if files.format == "text":
        for path in files.paths:
            yield Document(path.read_text("utf-8", errors="replace"))
        return
    left = float("inf") if part.max_bytes is None else part.max_bytes
    columns = [c for c in (part.chat, part.prompt, part.answer) if c is not None] or [part.field]
    for where, record in _records(files, columns):
        document = _document(part, where, record, columns, template)
        left -= len(document.text.encode("utf-8", errors="replace"))
        if left < 0:
            return
        if document.text:
            yield document


def _records(files: Files, columns: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in files.paths:
        if files.format == "jsonl":
            yield from _lines(path)
        elif files.format == "parquet":
            yield from _rows(path, columns)
        else:
            yield from _of_datasets(path)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".json":  # a list, perhaps
            text = file.read()
            if text.lstrip().startswith("["):
                for i, record in enumerate(json.loads(text)):
                    yield f"{path}, record {i + 1}", record
                return
            file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from None


def _rows(path: Path, columns: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    _need("pyarrow", path)
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        there = file.schema_arrow.names
        wanted = [c for c in columns if c in there] if set(columns) <= set(there) else None
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", record


def _of_datasets(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    _need("datasets", path)
    import datasets

    loaded: Any = datasets.load_from_disk(str(path))
    if isinstance(loaded, Mapping):
        if "train" not in loaded:
            splits = ", ".join(loaded)
            remedy = f"name the folder of one, {path}/{min(loaded)}"
            raise ValueError(f"{path} holds {splits}, not train: {remedy}")
        loaded = loaded["train"]
    for number, record in enumerate(loaded):
        yield f"{path}, row {number + 1}", record


def _need(package: str, path: Path) -> None:
    if find_spec(package) is None:
        raise ValueError(f"{path} is read by {package}, which is not installed: pip install 'espalier[data]'")


def _document(
    part: Source, where: str, record: Any, columns: list[str], template: Template | None
) -> Document:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where}: expected an object with columns, got {type(record).__name__}")
    missing = [c for c in columns if record.get(c) is None]
    if missing:
        key = "data.chat" if part.chat else "data.prompt, data.answer" if part.answer else "data.field"
        raise ValueError(f"{where} has no column {missing[0]!r} ({key}); it has {', '.join(record)}")
    if part.chat is not None:
        assert template is not None
        return template.document(record[part.chat], where, part.only_answers)
    for column in columns:
        if not isinstance(record[column], str):
            raise ValueError(f"{where}: {column} holds {type(record[column]).__name__}, expected text")
    if part.answer is not None and part.prompt is not None:
        prompt, answer = record[part.prompt], record[part.answer]
        whole = prompt + answer
        return Document(whole, ((len(prompt), len(whole)),) if part.only_answers else None)
    return Document(record[part.field])


class Template:
    """The text of conversations, by a tokenizer's chat template.

    Args:
        tokenizer: file ``tokenizer.json``, with ``tokenizer_config.json`` beside it perhaps.
        path: of a template of Jinja; the tokenizer's own when None.

    Raises:
        ValueError: there is none, or transformers is missing.
    """

    def __init__(self, tokenizer: Path, path: Path | None = None) -> None:
        if find_spec("transformers") is None:
            raise ValueError("chat templates need transformers: pip install 'espalier[hf]'")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if (tokenizer.parent / "tokenizer_config.json").is_file():
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer.parent, local_files_only=True)
        else:
            self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
        if path is not None:
            self._tokenizer.chat_template = path.read_text("utf-8")
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{tokenizer.parent} has no chat template: give one, data.chat_template = a file of Jinja"
            )
        self.text = str(self._tokenizer.chat_template)

    def render(self, messages: list[Mapping[str, Any]], *, asks: bool = False) -> str:
        """The text of messages; with ``asks`` up to where the next answer begins."""
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks))

    def document(self, messages: Any, where: str, only_answers: bool) -> Document:
        """A conversation, and where the assistant's answers are in it.

        Raises:
            ValueError: it is none, or answers cannot be told from the rest.
        """
        fits = isinstance(messages, list) and all(isinstance(m, Mapping) and "role" in m for m in messages)
        if not fits or not messages:
            raise ValueError(f"{where}: expected a list of {{role, content}}, got {str(messages)[:60]}")
        whole = self.render(messages)
        if not only_answers:
            return Document(whole, ends=False)
        learned = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], asks=True) if i else ""
            after = self.render(messages[: i + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise ValueError(
                    f"{where}: the chat template writes messages otherwise once there are later ones, so "
                    'that answers cannot be told apart: data.loss = "all" learns all'
                )
            learned.append((len(before), len(after)))
        return Document(whole, tuple(learned), ends=False)
