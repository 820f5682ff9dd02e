"""Text preparation and batches."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from espalier.train.corpus import prepare_text, unigram_entropy
from espalier.train.data import ImageBatches, TextBatches, TokenBatches


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(12):
        lines = [f"def function_{i}_{j}(value):\n    return value + {i * j}\n" for j in range(20)]
        (folder / f"module{i:02}.py").write_text("\n".join(lines))
    return folder


def prepare(source, cache, **changes):
    options = {"pattern": "*.py", "vocab_size": 300, "max_bytes": None, "val_fraction": 0.2}
    return prepare_text(source=str(source), cache=cache, **{**options, **changes})


def text_of(tokenizer, tokens):
    return tokenizer.decode(list(map(int, tokens)), skip_special_tokens=True)


def test_tokens_spell_the_text(source, tmp_path):
    text = prepare(source, tmp_path / "cache")
    assert text.train.dtype == np.uint16
    everything = text_of(text.tokenizer, text.train) + text_of(text.tokenizer, text.val)
    files = [path.read_text() for path in sorted(source.iterdir())]
    assert sorted(everything) == sorted("".join(files))
    assert max(text.train.max(), text.val.max()) < 300
    share = len(text.val) / (len(text.val) + len(text.train))
    assert 0.1 < share < 0.3
    assert text.entropy == pytest.approx(unigram_entropy(np.array(text.train)))


def test_prepared_once_and_the_same_again(source, tmp_path):
    said = []
    first = prepare(source, tmp_path / "cache", report=said.append)
    second = prepare(source, tmp_path / "cache", report=said.append)
    elsewhere = prepare(source, tmp_path / "other", report=said.append)
    assert len(said) == 2 and first.folder == second.folder != elsewhere.folder
    assert np.array_equal(first.train, elsewhere.train)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


def test_other_options_other_folder(source, tmp_path):
    folders = {
        prepare(source, tmp_path, **changes).folder
        for changes in ({}, {"vocab_size": 290}, {"val_fraction": 0.1}, {"max_bytes": 3000})
    }
    assert len(folders) == 4


def test_size_cap(source, tmp_path):
    text = prepare(source, tmp_path, max_bytes=3000)
    assert 0 < text.bytes <= 3000


@pytest.mark.parametrize("damage", ["short", "info", "tokenizer"])
def test_damaged_cache_is_made_anew(source, tmp_path, damage):
    text = prepare(source, tmp_path)
    before = np.array(text.train)
    if damage == "short":
        (text.folder / "train.bin").write_bytes(before[:10].tobytes())
    elif damage == "info":
        (text.folder / "info.json").write_text("{")
    else:
        (text.folder / "tokenizer.json").unlink()
    assert np.array_equal(prepare(source, tmp_path).train, before)


def _prepare_in_process(source, cache, queue):
    said = []
    text = prepare(source, cache, report=said.append)
    queue.put((len(said), len(text.train)))


def test_many_processes_prepare_once(source, tmp_path, forked):
    queue = forked.Queue()
    processes = [forked.Process(target=_prepare_in_process, args=(source, tmp_path, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sum(count for count, _ in answers) == 1
    assert len({length for _, length in answers}) == 1


def test_single_file_is_cut_in_two(source, tmp_path):
    text = prepare(source / "module03.py", tmp_path)
    assert len(text.train) > len(text.val) > 0


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("missing", {}, "is neither a file nor a folder"),
        ("", {"pattern": "*.txt"}, "has no text in files like '\\*.txt'"),
        ("", {"vocab_size": 200}, "at least 258 tokens"),
        ("", {"max_bytes": 5}, "within data.max_bytes = 5"),
    ],
)
def test_mistakes(source, tmp_path, where, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(source / where, tmp_path, **changes)


def test_standard_library(tmp_path):
    text = prepare_text(
        source="stdlib", pattern="", cache=tmp_path, vocab_size=400, max_bytes=300_000, val_fraction=0.1
    )
    assert 200_000 < text.bytes <= 300_000
    assert text.entropy < math.log(400)
    assert json.loads((text.folder / "info.json").read_text())["train"] == len(text.train)


def test_entropy():
    assert unigram_entropy(np.array([3, 5, 3, 5])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.array([7, 7])) == 0


def sources():
    text = np.arange(1000, dtype=np.uint16) % 97
    return {
        "text": TextBatches(text, 6, 10, "next", seed=4),
        "masked": TextBatches(text, 6, 10, "masked", seed=4),
        "spread": TextBatches(text, 6, 10, "next", seed=4, spread=3),
        "tokens": TokenBatches(50, 6, 10, "next", seed=4, ignored=0.2),
        "images": ImageBatches((3, 4, 4), 5, 6, seed=4, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_rows_do_not_depend_on_the_ranks(name, ranks):
    source = sources()[name]
    whole = source.batch(7)
    cuts = [-(-6 * i // ranks) for i in range(ranks + 1)]
    parts = [source.batch(7, slice(a, b)) for a, b in pairwise(cuts)]
    for key, tensor in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), tensor)


@pytest.mark.parametrize("name", sources())
def test_steps_and_rows_differ(name):
    source = sources()[name]
    key = "pixel_values" if name == "images" else "input_ids"
    first, second = source.batch(0)[key], source.batch(1)[key]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, source.batch(0)[key])


def test_labels_are_the_next_tokens():
    batch = sources()["text"].batch(3)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal((batch["input_ids"] + 1) % 97, batch["labels"] % 97)


def test_masked_labels():
    batch = sources()["masked"].batch(3)
    hidden = batch["labels"] != -100
    assert hidden.any(1).all() and not hidden.all()
    assert (batch["input_ids"][hidden] == 1).all()


def test_labels_of_models_that_shift_themselves():
    batch = TextBatches(np.arange(100, dtype=np.uint16), 2, 10, "same", seed=0).batch(0)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_random_labels_leave_different_numbers_out():
    labels = TokenBatches(50, 8, 40, "next", seed=0, ignored=0.3).batch(0)["labels"]
    assert len(set((labels == -100).sum(1).tolist())) > 2


def test_validation_covers_the_text():
    source = TextBatches(np.arange(1000, dtype=np.uint16), 6, 10, "next", seed=4, spread=3)
    starts = torch.cat([source.batch(i)["input_ids"][:, 0] for i in range(3)])
    assert starts.diff().min() > 50
    assert starts[0] == 0
    assert source.batch(2)["labels"][-1, -1] == 999
    assert torch.equal(source.batch(0)["input_ids"], source.batch(3)["input_ids"])


def test_too_short_a_text():
    with pytest.raises(ValueError, match="at least 11, but the part of it to train on has 9"):
        TextBatches(np.arange(9, dtype=np.uint16), 2, 10, "next", seed=0)


def test_a_given_tokenizer_cuts_the_text(source, tmp_path):
    own = prepare(source, tmp_path / "first", vocab_size=280)
    given = tmp_path / "tokenizer.json"
    tokenizer = own.tokenizer
    tokenizer.enable_truncation(3)  # as files that others save may say
    tokenizer.save(str(given))
    text = prepare(source, tmp_path / "cache", tokenizer=given, vocab_size=400)
    assert text.tokenizer.get_vocab() == own.tokenizer.get_vocab()
    assert np.array_equal(text.train, own.train) and text.mask == own.tokenizer.token_to_id("<|mask|>")
    assert prepare(source, tmp_path / "cache", tokenizer=given, vocab_size=400).folder == text.folder
    assert prepare(source, tmp_path / "cache", vocab_size=400).folder != text.folder
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.save(str(given))
    assert prepare(source, tmp_path / "cache", tokenizer=given, vocab_size=400).folder != text.folder
