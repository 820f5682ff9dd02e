"""What jobs read: records, conversations, tokens, images, mixtures; and in which order."""

import gc
import json
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from espalier.engine.loader import restore_loaders
from espalier.train.corpus import prepare
from espalier.train.data import Mix, SampledBatches, shuffled, training_batches, validation_batches
from espalier.train.job import Job, JobError
from espalier.train.sections import Part
from espalier.train.sources import Template, documents, files_of

WORDS = [f"w{i}" for i in range(40)]
CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant> {% endif %}"


@pytest.fixture
def tokenizer(tmp_path):
    names = ["[UNK]", "<user>", "<assistant>", "<end>", *WORDS]
    made = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def job(tmp_path, vocab_size=64, **data):
    tables = {
        "model": {
            "kind": "gpt",
            "vocab_size": vocab_size,
            "layers": 1,
            "hidden": 8,
            "heads": 1,
            "max_positions": 16,
        },
        "data": {"cache": str(tmp_path / "cache"), **data},
        "train": {"batch_size": 4, "sequence": 8, "eval_batches": 2},
    }
    return Job.from_dict(tables, source=str(tmp_path / "job.toml"))


def both(job):
    corpus = prepare(job)
    given = {"size": 4, "sequence": job.train.sequence, "seed": 0, "dtype": torch.float32}
    return training_batches(job, corpus, **given), validation_batches(job, corpus, dtype=torch.float32)


def lines(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_the_loss_is_on_answers_alone(tokenizer, tmp_path):
    turns = [("user", "w1 w2"), ("assistant", "w3"), ("user", "w4"), ("assistant", "w5 w6")]
    chat = [{"role": role, "content": text} for role, text in turns]
    source = lines(tmp_path / "a.jsonl", [{"messages": chat}] * 4)
    made = job(tmp_path, source=source, chat="messages", tokenizer=str(tokenizer), rows="padded")
    text = prepare(made).parts[0][1]
    ids, learned = text.ids[: text.starts[1]], text.learned[: text.starts[1]]
    told = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(ids[learned == 1].tolist())
    assert told.split() == ["w3", "<end>", "w5", "w6", "<end>"]
    batch = both(made)[0].batch(1)
    assert batch["input_ids"].shape == (4, 8)
    assert (batch["labels"] == -100).sum() > 0
    # a row that is cut off keeps what is before; shifted by one, as this model wants it
    window = ids[:9].astype(np.int64)
    assert batch["input_ids"][0].tolist() == window[:-1].tolist()
    expected = np.where(learned[1:9] == 1, window[1:], -100)
    assert batch["labels"][0].tolist() == expected.tolist()


def test_templates_that_cannot_tell_answers(tokenizer, tmp_path):
    (tmp_path / "last.jinja").write_text("{{ messages[-1].content }}")
    template = Template(tokenizer / "tokenizer.json", tmp_path / "last.jinja")
    chat = [{"role": "assistant", "content": "w1"}, {"role": "user", "content": "w2"}]
    assert template.document(chat, "here", False).text == "w2"
    with pytest.raises(ValueError, match=r"here: the chat template .* data.loss = \"all\""):
        template.document(chat, "here", True)
    with pytest.raises(ValueError, match="here: expected a list of {role, content}"):
        template.document("w1", "here", True)


def test_pairs_and_their_padding(tokenizer, tmp_path):
    records = [{"q": f"w{i} ", "a": f"w{i + 1} w{i + 2}"} for i in range(8)]
    source = lines(tmp_path / "a.jsonl", records)
    made = job(tmp_path, source=source, prompt="q", answer="a", tokenizer=str(tokenizer), rows="padded")
    batch = both(made)[0].batch(1)
    assert ((batch["labels"] != -100).sum(1) == 3).all()  # two words, and the end
    assert (batch["input_ids"][:, 4:] == 0).all()


def test_records_of_every_format(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    records = [{"text": f"w{i} w{i + 1}", "n": i} for i in range(6)]
    lines(tmp_path / "a.jsonl", records)
    (tmp_path / "b.json").write_text(json.dumps(records))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "d"))
    read = []
    for name in ("a.jsonl", "b.json", "c.parquet", "d"):
        part = Part(source=str(tmp_path / name))
        read.append([document.text for document in documents(part, files_of(part), None)])
    assert read[0] == [record["text"] for record in records]
    assert all(each == read[0] for each in read)
    short = Part(source=str(tmp_path / "a.jsonl"), max_bytes=11)
    assert len(list(documents(short, files_of(short), None))) == 2
    part = Part(source=str(tmp_path / "a.jsonl"), field="body")
    with pytest.raises(ValueError, match=r"line 1 has no column 'body' \(data.field\); it has text, n"):
        list(documents(part, files_of(part), None))
    (tmp_path / "e").mkdir()
    lines(tmp_path / "e" / "x.jsonl", records)
    (tmp_path / "e" / "y.parquet").write_bytes(b"")
    mixed = Part(source=str(tmp_path / "e"), pattern="*.*")
    with pytest.raises(ValueError, match="jsonl and parquet files"):
        files_of(mixed)


def test_files_of_tokens(tmp_path):
    ids = np.arange(200) % 50
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", ids.astype(np.int32))
    found = []
    for name in ("a.bin", "a.npy"):
        train, val = both(job(tmp_path, source=str(tmp_path / name), order="epochs"))
        batch = train.batch(1)
        assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
        found.append(batch["input_ids"])
        assert val.batch(0)["input_ids"].shape == (4, 8)
    assert torch.equal(*found)
    (ids + 40).astype(np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(ValueError, match="tokens from 40 to 89, but the model has a vocabulary of 64"):
        both(job(tmp_path, source=str(tmp_path / "b.bin")))


def test_each_sample_once_in_an_epoch():
    for count in (1, 2, 3, 17, 64, 1000):
        for epoch in range(2):
            assert sorted(shuffled(i, count, (5, epoch)) for i in range(count)) == list(range(count))
    first, second = ([shuffled(i, 100, (5, epoch)) for i in range(100)] for epoch in range(2))
    assert first != second and first != list(range(100))


@pytest.mark.parametrize("weights", [(1.0, 3.0), (0.2, 0.3, 0.5), (1.0, 1e-4)])
def test_mixtures_keep_to_their_shares(weights):
    mix = Mix(weights, 3)
    places = [mix.place(number) for number in range(2500)]
    counts = Counter(which for which, _ in places)
    for which, share in enumerate(mix.shares):
        assert abs(counts[which] - share * 2500) <= 60
        assert [i for w, i in places if w == which] == list(range(counts[which]))


def test_a_mixture_has_one_tokenizer_and_a_validation_of_its_own(tmp_path):
    """Trained on all of its sources, and on nothing that is kept for validation; found again."""
    for name, words in (("a", "alpha beta"), ("b", "omega psi"), ("kept", "alpha omega")):
        (tmp_path / f"{name}.txt").write_text(f"{words} " * 60)
    mixture = [{"source": str(tmp_path / f"{name}.txt"), "weight": w} for name, w in (("a", 1.0), ("b", 3.0))]
    made, told = job(tmp_path, vocab_size=300, mixture=mixture, validation=str(tmp_path / "kept.txt")), []
    corpus = prepare(made, told.append)
    assert "training a tokenizer of 300 on 2 sources" in told[0]
    again = []
    assert prepare(made, again.append).tokenizer_file == corpus.tokenizer_file and not again
    tokenizer = corpus.tokenizer
    assert {len(tokenizer.encode(f" {word}").ids) for word in ("alpha", "omega")} == {1}
    weights, texts = zip(*corpus.parts, strict=True)
    assert weights == (1.0, 3.0)
    ((_, held),) = corpus.validation
    assert tokenizer.decode(held.ids.tolist()).startswith("alpha omega alpha omega")
    assert [tokenizer.decode(x.ids[:2].tolist()).split()[0] for x in texts] == ["alpha", "omega"]


def test_rows_hang_on_nothing_but_their_place():
    sources = [(1.0, Numbers(7)), (2.0, Numbers(11))]
    whole = SampledBatches(sources, 6, seed=1)
    halves = [whole.batch(3, rows)["x"] for rows in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(halves), SampledBatches(sources, 6, seed=1).batch(3)["x"])
    assert len(whole.batch(3, slice(6, 6))["x"]) == 0
    # twice the batch is the same samples in the same order
    double = SampledBatches(sources, 12, seed=1)
    assert torch.equal(double.batch(1)["x"], torch.cat([whole.batch(1)["x"], whole.batch(2)["x"]]))


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def row(self, index, draw):
        return {"x": index + 100 * self.count}


def test_images_in_folders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(4):
            image.new("RGB", (10, 6), colour).save(tmp_path / "set" / name / f"{i}.png")
    tables = {
        "model": {"kind": "vit", "image": 8, "patch": 4, "classes": 2, "layers": 1, "hidden": 8, "heads": 1},
        "data": {"kind": "image-folder", "source": str(tmp_path / "set"), "val_fraction": 0.25, "flip": True},
    }
    made = Job.from_dict(tables)
    train, val = both(made)
    batch = train.batch(1)
    assert batch["pixel_values"].shape == (4, 3, 8, 8) and batch["pixel_values"].dtype is torch.float32
    red = batch["pixel_values"][:, 0].mean((1, 2)) > 0
    assert torch.equal(red, batch["labels"] == 0)
    assert sorted(set(val.batch(0)["labels"].tolist())) == [0, 1]
    tables["model"]["classes"] = 1
    with pytest.raises(ValueError, match="has 2 classes, but the model tells 1 apart"):
        both(Job.from_dict(tables))


OWN = """
import torch
from types import SimpleNamespace

class Line(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(slope))

    def forward(self, x, labels):
        return SimpleNamespace(loss=(self.slope * x - labels).square().mean())

class Points:
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"x": float(i), "labels": 2.0 * i}

def data(extra=0):
    return Points()
"""


def test_a_model_and_a_dataset_of_ones_own(tmp_path):
    (tmp_path / "own_parts.py").write_text(OWN)
    tables = {
        "model": {"kind": "module", "build": "own_parts:Line", "arguments": {"slope": 0.5}},
        "data": {"kind": "module", "build": "own_parts:data"},
    }
    made = Job.from_dict(tables, source=str(tmp_path / "job.toml"))
    assert float(made.model.build().slope.detach()) == 0.5
    batch = both(made)[0].batch(1)
    assert batch["x"].dtype is torch.float32 and torch.equal(batch["labels"], 2 * batch["x"])
    tables["model"]["build"] = "own_parts:Lin"
    wrong = Job.from_dict(tables, source=str(tmp_path / "job.toml"))
    with pytest.raises(ValueError, match="own_parts has no such function; did you mean 'Line'"):
        wrong.model.build()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"prompt": "q"}, "prompt and answer are columns that go together"),
        ({"loss": "answers"}, "answers are in conversations"),
        ({"chat": "m", "prompt": "q", "answer": "a"}, "leave one out"),
        ({"rows": "padded", "order": "random"}, "is for packed rows"),
        ({"mixture": [{"source": "x", "wieght": 2.0}]}, "did you mean data.mixture.0.weight?"),
    ],
)
def test_mistakes(tmp_path, data, told):
    with pytest.raises(JobError) as caught:
        job(tmp_path, **data)
    assert told in str(caught.value)


class Holder:
    """Holds what it is given, and itself: garbage that only a collection takes away."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


def test_a_shuffled_loader_that_is_garbage_is_not_told_of() -> None:
    """One that is there is: where it stands no checkpoint knows."""
    loader = DataLoader([1, 2, 3], shuffle=True)
    with pytest.warns(UserWarning, match="shuffled DataLoader"):
        restore_loaders((), None)
    gc.disable()
    try:
        Holder(loader)
        del loader
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            restore_loaders((), None)
    finally:
        gc.enable()
