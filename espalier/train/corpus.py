"""Text as tokens on disk: made once, memory-mapped by every rank.

The folder of a prepared text appears under its final name by one rename, when it is complete, so a reader
never sees half of it. A file lock makes one process prepare it while all others wait.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

from espalier.train.job import MASKS, Job, first_of
from espalier.train.sections import Part, Source, TextData
from espalier.train.sources import Document, Files, Template, documents, files_of

Array = np.ndarray[Any, Any]
Report = Callable[[str], None]

END_OF_TEXT = "<|endoftext|>"
_SPECIAL = (END_OF_TEXT, MASKS[0])
# what others call them
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_FORMAT = 2
_AT_ONCE = 512  # documents
_SAMPLED = 10**7  # tokens of a file of tokens that are looked at


@dataclass(frozen=True)
class Tokens:
    """Documents, one behind the other.

    Attributes:
        ids: [tokens] memory-mapped.
        starts: [documents + 1] where each begins; the last is where the last one ends. None: one document.
        learned: [tokens] 1 where the loss counts, or None for everywhere.
    """

    ids: Array
    starts: Array | None = None
    learned: Array | None = None


@dataclass(frozen=True)
class Text:
    """A prepared text.

    Attributes:
        folder: where it lies; None for files of tokens, which are used where they are.
        training: tokens for training.
        validation: tokens for validation, from other documents.
        entropy: nats per token of the training tokens' frequencies: the loss of
            a model that knows nothing but how often each token occurs.
        files: number of files read.
        bytes: their size.
    """

    folder: Path | None
    training: Tokens
    validation: Tokens
    entropy: float
    files: int
    bytes: int

    @property
    def train(self) -> Array:
        """[tokens] for training."""
        return self.training.ids

    @property
    def val(self) -> Array:
        """[tokens] for validation."""
        return self.validation.ids

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        assert self.folder is not None
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def mask(self) -> int:
        """The token that hides others; 1 where there is none."""
        return _mask(self.tokenizer)


@dataclass(frozen=True)
class Corpus:
    """All that a job reads.

    Attributes:
        parts: prepared texts, each with its share of the rows.
        validation: what is kept apart, each with its share.
        tokenizer_file: what made the tokens; None where files of tokens are given without one.
        entropy: see :class:`Text`; None where texts are mixed.
    """

    parts: list[tuple[float, Tokens]]
    validation: list[tuple[float, Tokens]]
    tokenizer_file: Path | None
    entropy: float | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the tokens."""
        return None if self.tokenizer_file is None else Tokenizer.from_file(str(self.tokenizer_file))

    @property
    def mask(self) -> int:
        """The token that hides others; 1 where there is none."""
        return 1 if self.tokenizer is None else _mask(self.tokenizer)


def _mask(tokenizer: Tokenizer) -> int:
    mask = first_of(tokenizer, MASKS)
    return 1 if mask is None else mask


def end_of(tokenizer: Tokenizer, file: Path | None = None) -> int | None:
    """The token that ends a text: what the config beside ``tokenizer.json`` calls so, or a usual one."""
    name = None if file is None else _end_name(file)
    return first_of(tokenizer, _ENDS if name is None else (name, *_ENDS))


def prepare(job: Job, report: Report = lambda message: None) -> Corpus | None:
    """Prepare the job's text, or find it prepared; None for other data.

    Raises:
        ValueError: for a source without text, or too small a vocabulary.
    """
    data, vocab_size = job.data, job.facts.vocab_size
    if not isinstance(data, TextData):
        return None
    assert vocab_size is not None
    cache, tokenizer = Path(data.cache), job.tokenizer
    parts = [(part, files_of(part)) for part in data.parts]
    template = None
    if any(part.chat for part, _ in parts):
        template = _template(data, tokenizer)
    if tokenizer is None and any(files.format != "tokens" for _, files in parts) and len(parts) > 1:
        tokenizer = _shared_tokenizer(parts, cache, vocab_size, template, report)
    held = 0.0 if data.validation is not None else data.val_fraction
    weighted: list[tuple[float, Text]] = []
    for part, files in parts:
        if files.format == "tokens":
            texts = [_of_tokens(part, path, vocab_size, held) for path in files.paths]
        else:
            arguments = (part, files, cache, vocab_size, held, tokenizer, template, report)
            texts = [_prepared(*arguments)]
        total = sum(len(text.train) for text in texts)
        weighted += [(part.weight * len(text.train) / max(total, 1), text) for text in texts]
    used = tokenizer or next((t.folder / "tokenizer.json" for _, t in weighted if t.folder is not None), None)
    training = [(weight, text.training) for weight, text in weighted]
    validation = [(weight, text.validation) for weight, text in weighted]
    if data.validation is not None:
        apart = Part(**{**dict(data.parts[0]), "source": data.validation, "pattern": None, "max_bytes": None})
        files = files_of(apart)
        if files.format == "tokens":
            kept = [_of_tokens(apart, path, vocab_size, 0.0) for path in files.paths]
        else:
            kept = [_prepared(apart, files, cache, vocab_size, 0.0, used, template, report)]
        validation = [(float(len(text.train)), text.training) for text in kept]
    return Corpus(training, validation, used, weighted[0][1].entropy if len(weighted) == 1 else None)


def _template(data: TextData, tokenizer: Path | None) -> Template:
    if tokenizer is None:
        reason = "conversations need a tokenizer with a chat template: give data.tokenizer = a folder"
        raise ValueError(reason)
    return Template(tokenizer, None if data.chat_template is None else Path(data.chat_template))


def prepare_text(
    *,
    source: str,
    pattern: str | None,
    cache: Path,
    vocab_size: int,
    max_bytes: int | None,
    val_fraction: float,
    tokenizer: Path | None = None,
    report: Report = lambda message: None,
) -> Text:
    """Return the tokens of a text, made now or found in ``cache``.

    Args:
        source: "stdlib", or a file or folder.
        pattern: which files of a folder are read.
        cache: folder for prepared texts.
        vocab_size: largest number of tokens; where a tokenizer is trained at least 258 (256 bytes and 2
            special ones).
        max_bytes: read whole files, in the order of their names, up to this size.
        val_fraction: share of the text, in whole files, kept for validation.
        tokenizer: a file ``tokenizer.json``; None: one is trained on the text.
        report: told what takes time.

    Raises:
        ValueError: for a source without text or a vocabulary below 258.
    """
    part = Part(source=source, pattern=pattern or None, max_bytes=max_bytes)
    _check_vocabulary(vocab_size, tokenizer)
    return _prepared(part, files_of(part), cache, vocab_size, val_fraction, tokenizer, None, report)


def _check_vocabulary(vocab_size: int, tokenizer: Path | None) -> None:
    smallest = 256 + len(_SPECIAL)
    if tokenizer is None and vocab_size < smallest:
        raise ValueError(
            f"a byte-pair vocabulary needs at least {smallest} tokens (every byte and {len(_SPECIAL)} "
            f"special tokens), got model vocab_size = {vocab_size}"
        )


def _prepared(
    part: Source,
    files: Files,
    cache: Path,
    vocab_size: int,
    val_fraction: float,
    tokenizer: Path | None,
    template: Template | None,
    report: Report,
) -> Text:
    _check_vocabulary(vocab_size, tokenizer)
    key = _key(part, files, vocab_size, val_fraction, tokenizer, template)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    dataset = _open(folder)
    if dataset:
        return dataset
    with FileLock(cache / f"{key}.lock"):
        dataset = _open(folder)
        if dataset:
            return dataset
        by = f"a tokenizer of {vocab_size}" if tokenizer is None else str(tokenizer)
        kinds = ", ".join(sorted({path.suffix or path.name for path in files.paths}))
        count = files.paths[0].name if len(files.paths) == 1 else f"{len(files.paths)} files ({kinds})"
        report(f"preparing {_size(files.size)} of text, {count}, with {by}")
        shutil.rmtree(folder, ignore_errors=True)
        _write(folder, part, files, vocab_size, val_fraction, tokenizer, template)
    dataset = _open(folder)
    if dataset is None:
        raise ValueError(f"the prepared text in {folder} cannot be read back; is the disk full?")
    return dataset


def _size(n: int) -> str:
    return f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} KB"


def unigram_entropy(tokens: Array) -> float:
    """Entropy in nats of the frequencies of ``tokens`` [n]."""
    return _entropy(np.bincount(tokens))


def _entropy(counts: Array) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _key(
    part: Source,
    files: Files,
    vocab_size: int,
    val_fraction: float,
    tokenizer: Path | None,
    template: Template | None,
) -> str:
    options: list[Any] = [_FORMAT, tokenizers_version, vocab_size, val_fraction, part.only_answers]
    options += [part.field, part.chat, part.prompt, part.answer, part.max_bytes]
    if tokenizer is not None:
        options.append(hashlib.sha256(tokenizer.read_bytes()).hexdigest())
        options.append(_end_name(tokenizer))
    if template is not None:
        options.append(template.text)
    paths = chain.from_iterable(sorted(p.rglob("*.arrow")) if p.is_dir() else [p] for p in files.paths)
    stamp = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([options, stamp]).encode()).hexdigest()[:16]


def _end_name(tokenizer: Path) -> str | None:
    """What a tokenizer's own config calls the end of a text."""
    try:
        said = json.loads((tokenizer.parent / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
    except (OSError, ValueError):
        return None
    name = said.get("content") if isinstance(said, dict) else said
    return name if isinstance(name, str) else None


def _shared_tokenizer(
    parts: list[tuple[Part, Files]], cache: Path, vocab_size: int, template: Template | None, report: Report
) -> Path:
    """A tokenizer trained on all sources of a mixture."""
    _check_vocabulary(vocab_size, None)
    read = [(part, files) for part, files in parts if files.format != "tokens"]
    keys = [_key(part, files, vocab_size, 0.0, None, template) for part, files in read]
    name = hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]
    path = cache / f"tokenizer-{name}" / "tokenizer.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"tokenizer-{name}.lock"):
        if not path.is_file():
            report(f"training a tokenizer of {vocab_size} on {len(read)} sources")
            every = chain.from_iterable(documents(part, files, template) for part, files in read)
            path.parent.mkdir(exist_ok=True)
            hidden = path.with_name(f".{os.getpid()}")
            _train_tokenizer((document.text for document in every), vocab_size).save(str(hidden))
            os.replace(hidden, path)
    return path


# ---- writing


class _Half:
    """Documents of one purpose, being written."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], learned: bool, stack: ExitStack
    ) -> None:
        self._ids: BinaryIO = stack.enter_context((folder / f"{name}.bin").open("wb+"))
        self._learned = stack.enter_context((folder / f"{name}.learned").open("wb+")) if learned else None
        self._dtype, self.starts, self._path = dtype, [0], folder / f"{name}.starts"

    @property
    def tokens(self) -> int:
        """So far."""
        return self.starts[-1]

    def add(self, ids: Array, learned: Array) -> None:
        """A document."""
        self._ids.write(ids.astype(self._dtype).tobytes())
        if self._learned is not None:
            self._learned.write(learned.tobytes())
        self.starts.append(self.tokens + len(ids))

    def cut(self, at: int) -> tuple[Array, Array]:
        """Take off all tokens from one on; they are given."""
        size = self._dtype.itemsize
        self._ids.seek(at * size)
        ids = np.frombuffer(self._ids.read(), self._dtype)
        self._ids.truncate(at * size)
        learned = np.ones(len(ids), np.uint8)
        if self._learned is not None:
            self._learned.seek(at)
            learned = np.frombuffer(self._learned.read(), np.uint8)
            self._learned.truncate(at)
        self._ids.seek(0, os.SEEK_END)
        kept = [start for start in self.starts if start < at]
        self.starts = [*kept, at]
        return ids, learned

    def close(self) -> None:
        """Write where documents begin."""
        np.array(self.starts, np.int64).tofile(self._path)


def _write(
    folder: Path,
    part: Source,
    files: Files,
    vocab_size: int,
    val_fraction: float,
    tokenizer_path: Path | None,
    template: Template | None,
) -> None:
    every = documents(part, files, template)
    if tokenizer_path is None:
        texts = list(every)  # they are read twice
        tokenizer, every = _train_tokenizer((d.text for d in texts), vocab_size), iter(texts)
    else:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.no_truncation()  # as a file may ask for
    tokenizer.no_padding()
    end = end_of(tokenizer, tokenizer_path)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with ExitStack() as stack:
            halves = [_Half(temporary, n, dtype, part.only_answers, stack) for n in ("train", "val")]
            counts = _divide(_encoded(tokenizer, every, end), halves[0], halves[1], val_fraction)
            for half in halves:
                half.close()
        tokenizer.save(str(temporary / "tokenizer.json"))
        info = {
            "dtype": dtype.name,
            "train": halves[0].tokens,
            "val": halves[1].tokens,
            "learned": part.only_answers,
            "entropy": _entropy(counts),
            "files": len(files.paths),
            "bytes": files.size,
        }
        (temporary / "info.json").write_text(json.dumps(info, indent=1))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _encoded(
    tokenizer: Tokenizer, every: Iterable[Document], end: int | None
) -> Iterator[tuple[Array, Array]]:
    """Tokens of each document, and which of them are learned."""
    remaining = iter(every)
    while some := list(islice(remaining, _AT_ONCE)):
        exact = any(document.learned is not None for document in some)
        encode = tokenizer.encode_batch if exact else tokenizer.encode_batch_fast
        encodings = encode([document.text for document in some], add_special_tokens=False)
        for document, encoding in zip(some, encodings, strict=True):
            last = [end] if end is not None and document.ends else []
            ids = np.array([*encoding.ids, *last], np.int64)
            learned = np.ones(len(ids), np.uint8)
            if document.learned is not None:
                learned[: len(encoding.ids)] = _within(encoding, document.learned)
            yield ids, learned


def _within(encoding: Encoding, spans: Iterable[tuple[int, int]]) -> Array:
    """Which tokens have letters in one of the spans."""
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    learned = np.zeros(len(begins), bool)
    for start, stop in spans:
        learned |= (begins < stop) & (ends > start)
    return learned.astype(np.uint8)


def _divide(every: Iterable[tuple[Array, Array]], train: _Half, val: _Half, val_fraction: float) -> Array:
    """Whole documents to train and to validate on; a single one is cut in two.

    Returns:
        how often each token occurs in those to train on.
    """
    counts = np.zeros(1, np.int64)

    def counted(ids: Array, sign: int) -> None:
        nonlocal counts
        more = np.bincount(ids, minlength=len(counts))
        counts = np.pad(counts, (0, len(more) - len(counts))) + sign * more

    total = 0
    for ids, learned in every:
        total += len(ids)
        # Validation takes the next document whenever it would otherwise fall behind its share.
        if train.tokens and val.tokens + len(ids) / 2 < val_fraction * total:
            val.add(ids, learned)
        else:
            train.add(ids, learned)
            counted(ids, 1)
    if not total:
        raise ValueError("the source has no text")
    if val_fraction and not val.tokens:
        several = len(train.starts) > 2
        ids, learned = train.cut(train.starts[-2] if several else round(total * (1 - val_fraction)))
        val.add(ids, learned)
        counted(ids, -1)
    return counts


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# ---- reading


def _open(folder: Path) -> Text | None:
    """Map a prepared text; None where there is none or it is damaged."""
    try:
        info = json.loads((folder / "info.json").read_text())
        dtype = np.dtype(info["dtype"])
        train, val = (_half(folder, name, dtype, info) for name in ("train", "val"))
        entropy = float(info["entropy"])
        if not math.isfinite(entropy) or not (folder / "tokenizer.json").is_file():
            return None
        return Text(folder, train, val, entropy, info["files"], info["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _half(folder: Path, name: str, dtype: np.dtype[Any], info: dict[str, Any]) -> Tokens:
    size = info[name]
    starts = np.fromfile(folder / f"{name}.starts", np.int64)
    if not size:
        return Tokens(np.empty(0, dtype), starts)
    ids = np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")
    learned = np.memmap(folder / f"{name}.learned", np.uint8, mode="r") if info["learned"] else None
    lengths = {len(ids), size, int(starts[-1]), *([] if learned is None else [len(learned)])}
    if len(lengths) > 1:
        raise ValueError("damaged")
    return Tokens(ids, starts, learned)


def _of_tokens(part: Source, path: Path, vocab_size: int, val_fraction: float) -> Text:
    """A file of tokens, as it is: the end of it is for validation.

    Raises:
        ValueError: it is none, or has tokens that the model has not.
    """
    try:
        if path.suffix == ".npy":
            ids = np.load(path, mmap_mode="r")
        else:
            ids = np.memmap(path, dtype=np.dtype(part.dtype), mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no tokens: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = list(ids.shape)
        raise ValueError(f"{path} is {ids.dtype} of shape {shape}, expected one row of whole numbers")
    for looked in (ids[:_SAMPLED], ids[-_SAMPLED:]):
        if len(looked) and not 0 <= int(looked.min()) <= int(looked.max()) < vocab_size:
            raise ValueError(
                f"{path} has tokens from {looked.min()} to {looked.max()}, but the model has a vocabulary of "
                f"{vocab_size}. Is data.dtype = {part.dtype!r} right?"
            )
    cut = round(len(ids) * (1 - val_fraction))
    entropy = unigram_entropy(ids[:cut][:_SAMPLED])
    return Text(None, Tokens(ids[:cut]), Tokens(ids[cut:]), entropy, 1, ids.nbytes)
