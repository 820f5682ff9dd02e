"""Real text as tokens on disk: prepared once, memory-mapped by every rank.

The folder of a prepared text appears under its final name by one rename, when
it is complete, so a reader never sees half of it. A file lock makes one
process prepare it while all others wait.
"""

import hashlib
import json
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
_SPECIAL = (END_OF_TEXT, MASK)
# what others call them
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_MASKS = (MASK, "[MASK]", "<mask>")
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_FORMAT = 1


@dataclass(frozen=True)
class Text:
    """A prepared text.

    Attributes:
        folder: where it lies.
        train: [tokens] memory-mapped token ids for training.
        val: [tokens] memory-mapped token ids for validation, from other files.
        entropy: nats per token of the training tokens' frequencies: the loss of
            a model that knows nothing but how often each token occurs.
        files: number of text files read.
        bytes: their size.
    """

    folder: Path
    train: np.ndarray[Any, Any]
    val: np.ndarray[Any, Any]
    entropy: float
    files: int
    bytes: int

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def mask(self) -> int:
        """The token that hides others; 1 where there is none."""
        found = mask_of(self.tokenizer)
        return 1 if found is None else found


def prepare_text(
    *,
    source: str,
    pattern: str,
    cache: Path,
    vocab_size: int,
    max_bytes: int | None,
    val_fraction: float,
    tokenizer: Path | None = None,
    report: Callable[[str], None] = lambda message: None,
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
    smallest = 256 + len(_SPECIAL)
    if tokenizer is None and vocab_size < smallest:
        raise ValueError(
            f"a byte-pair vocabulary needs at least {smallest} tokens (every byte and {len(_SPECIAL)} "
            f"special tokens), got model vocab_size = {vocab_size}"
        )
    files = _select(_files(source, pattern), max_bytes)
    size = sum(path.stat().st_size for path in files)
    if not files:
        limit = "" if max_bytes is None else f" within data.max_bytes = {max_bytes}"
        raise ValueError(f"data.source = {source!r} has no text in files like {pattern!r}{limit}")
    key = _key(files, vocab_size, val_fraction, tokenizer)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key
    found = _open(folder)
    if found:
        return found
    with FileLock(cache / f"{key}.lock"):
        found = _open(folder)
        if found:
            return found
        by = f"a tokenizer of {vocab_size}" if tokenizer is None else str(tokenizer)
        report(f"preparing {size / 1e6:.1f} MB of text, {len(files)} files, with {by}")
        shutil.rmtree(folder, ignore_errors=True)
        _write(folder, files, size, vocab_size, val_fraction, tokenizer)
    made = _open(folder)
    if made is None:
        raise ValueError(f"the prepared text in {folder} cannot be read back; is the disk full?")
    return made


def unigram_entropy(tokens: np.ndarray[Any, Any]) -> float:
    """Entropy in nats of the frequencies of ``tokens`` [n]."""
    counts = np.bincount(tokens)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _files(source: str, pattern: str) -> list[tuple[str, Path]]:
    """Files to read, each with its name below the source, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib")) if source == "stdlib" else Path(source)
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise ValueError(f"data.source = {source!r} is neither a file nor a folder")
    pairs = []
    for path in root.rglob("*.py" if source == "stdlib" else pattern):
        relative = path.relative_to(root)
        if path.is_file() and (source != "stdlib" or not _SKIPPED & set(relative.parts)):
            pairs.append((relative.as_posix(), path))
    return sorted(pairs)


def _select(pairs: Iterable[tuple[str, Path]], max_bytes: int | None) -> list[Path]:
    chosen, total = [], 0
    for _, path in pairs:
        size = path.stat().st_size
        if size and (max_bytes is None or total + size <= max_bytes):
            chosen.append(path)
            total += size
    return chosen


def mask_of(tokenizer: Tokenizer) -> int | None:
    """The token of a tokenizer that hides others; None if it has none."""
    return _first_of(tokenizer, _MASKS)


def _first_of(tokenizer: Tokenizer, names: Iterable[str]) -> int | None:
    found = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in found if number is not None), None)


def _key(files: list[Path], vocab_size: int, val_fraction: float, tokenizer: Path | None) -> str:
    options = [_FORMAT, tokenizers_version, vocab_size, val_fraction]
    if tokenizer is not None:
        options.append(hashlib.sha256(tokenizer.read_bytes()).hexdigest())
    stamp = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([options, stamp]).encode()).hexdigest()[:16]


def _write(
    folder: Path, files: list[Path], size: int, vocab_size: int, val_fraction: float, given: Path | None
) -> None:
    texts = [path.read_text("utf-8", errors="replace") for path in files]
    tokenizer = _train_tokenizer(texts, vocab_size) if given is None else Tokenizer.from_file(str(given))
    tokenizer.no_truncation()  # as a file may ask for
    tokenizer.no_padding()
    end = _first_of(tokenizer, _ENDS)
    last = [] if end is None else [end]
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    train, val = _split([np.array([*e.ids, *last], dtype) for e in encodings], val_fraction)
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        train.tofile(temporary / "train.bin")
        val.tofile(temporary / "val.bin")
        tokenizer.save(str(temporary / "tokenizer.json"))
        info = {
            "dtype": dtype.name,
            "train": len(train),
            "val": len(val),
            "entropy": unigram_entropy(train),
            "files": len(files),
            "bytes": size,
        }
        (temporary / "info.json").write_text(json.dumps(info, indent=1))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _split(
    files: list[np.ndarray[Any, Any]], val_fraction: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Whole files to train and to validate on; a single file is cut in two."""
    if len(files) == 1:
        cut = round(len(files[0]) * (1 - val_fraction))
        return files[0][:cut], files[0][cut:]
    train, val, taken, total = [files[0]], [], 0, len(files[0])
    for tokens in files[1:]:
        total += len(tokens)
        # Validation takes the next file whenever it would otherwise fall behind its share.
        if taken + len(tokens) / 2 < val_fraction * total:
            val.append(tokens)
            taken += len(tokens)
        else:
            train.append(tokens)
    if not val:
        val.append(train.pop())
    return np.concatenate(train), np.concatenate(val)


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
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


def _open(folder: Path) -> Text | None:
    """Map a prepared text; None where there is none or it is damaged."""
    try:
        info = json.loads((folder / "info.json").read_text())
        dtype = np.dtype(info["dtype"])
        train = np.memmap(folder / "train.bin", dtype=dtype, mode="r")
        val = np.memmap(folder / "val.bin", dtype=dtype, mode="r")
        entropy = float(info["entropy"])
        sound = len(train) == info["train"] and len(val) == info["val"] and math.isfinite(entropy)
        if not sound or not (folder / "tokenizer.json").is_file():
            return None
        return Text(folder, train, val, entropy, info["files"], info["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
