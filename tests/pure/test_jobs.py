"""Job files: what is accepted, and that every mistake is told, at once and clearly."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from espalier.train.build import build_model, build_optimizer, check_buildable, rate
from espalier.train.job import Job, OptimizerSection
from espalier.train.mistakes import JobError
from espalier.train.overrides import parse_value

JOBS = Path(__file__).parents[2] / "jobs"
GOOD = """
[model]
kind = "gpt"
vocab_size = 300
layers = 2
hidden = 32
heads = 4
max_positions = 64

[plan]
data = 2

[train]
sequence = 32
"""


@pytest.fixture
def write(tmp_path):
    def to(text=GOOD, name="job.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to


def mistakes(path, *overrides):
    with pytest.raises(JobError) as caught:
        Job.load(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(JOBS.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_job_of_the_repository(path):
    if "huggingface" in path.read_text():
        pytest.importorskip("transformers")
    job = Job.load(path)
    assert check_buildable(job) > 0
    assert Job.from_dict(job.raw, source=job.source) == job


def test_defaults(write):
    job = Job.load(write())
    assert job.data.kind == "text" and job.optimizer.name == "AdamW" and job.train.clip is None
    assert job.name == "job" and job.out == Path("runs/job")
    assert job.facts.vocab_size == 300 and job.facts.labels == "next"


def test_overrides(write):
    job = Job.load(
        write(),
        [
            "plan.data=4",
            "model.kind=gpt2",
            "optimizer.betas=[0.8, 0.9]",
            "train.out=runs/x",
            "verify.steps = 5",
        ],
    )
    assert dict(job.plan) == {"data": 4}
    assert job.model.kind == "gpt2"
    assert job.optimizer.arguments["betas"] == (0.8, 0.9)
    assert job.train.out == "runs/x"
    assert job.verify.steps == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("2e-3", 2e-3),
        ("true", True),
        ("gpt2", "gpt2"),
        ('"2"', "2"),
        ("[1, 2]", [1, 2]),
        ("a/b", "a/b"),
    ],
)
def test_values_of_overrides(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize("bad", ["tensor=2", "plan.tensor", "=3", "plan.=3", "model.layers.x=3"])
def test_overrides_that_cannot_be_read(write, bad):
    assert f"--set = '{bad}'" in mistakes(write(), bad)


def test_every_mistake_at_once(write):
    text = GOOD.replace("sequence = 32", 'sequense = 32\nbatch_size = "8"\nlog_every = 0')
    text = text.replace("hidden = 32", "hiden = 32") + '\n[trian]\nsteps = 3\n[optimizer]\nname = "Adamw"\n'
    message = mistakes(write(text), "verify.stepz=3", "data.kind=txt")
    assert message.splitlines()[0].endswith("job.toml: 8 mistakes")
    for line in (
        "trian = {'steps': 3}: unknown key; did you mean train?",
        "model (gpt): unknown key 'hiden' (did you mean 'hidden'?)",
        "data.kind = 'txt' (from --set): expected one of text, tokens, images",
        "optimizer.name = 'Adamw': torch.optim has none usable by this name; did you mean 'AdamW'?",
        "train.sequense = 32: unknown key; did you mean train.sequence?",
        "train.batch_size = '8': expected a valid integer",
        "train.log_every = 0: expected greater than or equal to 1",
        "verify.stepz = 3 (from --set): unknown key; did you mean verify.steps?",
    ):
        assert line in message


def test_mistakes_of_the_plan(write):
    message = mistakes(write(), "plan.tensr=2", "train.steps=0")
    assert "plan" in message and "tensr" in message
    assert "train.steps = 0 (from --set)" in message
    assert "train.clip says it already" in mistakes(write(), "plan.clip=1.0", "train.clip=2.0")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.heads=5", "hidden = 32 is not a multiple of heads = 5"),
        ("model.kind=gtp", "did you mean 'gpt'?"),
        ("train.sequence=65", "train.sequence = 65 (from --set): is longer than the model's 64 positions"),
        ("plan.accumulate=17", "train.batch_size = 16: has too few rows for plan.accumulate = 17"),
        ("data.kind=images", "this model needs text or tokens"),
        ("optimizer.beta=[0.9, 0.9]", "unknown key; did you mean optimizer.betas?"),
        ("optimizer.lr=-1.0", "expected greater than 0"),
        ("optimizer.weight_decay=-1.0", "torch.optim.AdamW says: Invalid weight_decay value"),
        ("optimizer.name=LBFGS", "torch.optim has none usable by this name"),
        ("optimizer.name=SparseAdam", "does not support dense gradients"),
        ("plan.branch=2", "no job can say which modules are branches"),
        ("model.weights=3", "expected the path of a file or folder with weights"),
        ("model=3", "expected section.key=value"),
    ],
)
def test_single_mistakes(write, override, expected):
    assert expected in mistakes(write(), override)


def test_missing_file(write, tmp_path):
    path = write(name="demo.toml")
    assert f"did you mean {path}?" in mistakes(tmp_path / "dmo.toml")
    assert f"there is no folder {tmp_path / 'no'}" in mistakes(tmp_path / "no" / "demo.toml")


def test_broken_toml(write):
    assert "is not valid TOML" in mistakes(write("[model\n"))


def test_empty_file(write):
    text = mistakes(write(""))
    assert "model.kind: is missing; expected one of gpt, gpt2, moe, bert, vit, huggingface" in text


def test_a_value_where_a_table_belongs(write):
    assert "plan = 4: expected a table, [plan]" in mistakes(
        write("plan = 4\n" + GOOD.replace("[plan]\ndata = 2", ""))
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.class=LlamaForCausalML", "did you mean 'LlamaForCausalLM'?"),
        ("model.class=LlamaConfig", "this is not a model class"),
        ("model.class=LlamaModel", "expected a class whose name ends in"),
        ("model.config.hiden_size=66", "unknown key; did you mean model.config.hidden_size?"),
        ("model.config.hidden_size=wide", "hidden_size"),
        ("model.clas=Llama", "unknown key; did you mean model.class?"),
        ("data.kind=images", "this model needs text or tokens"),
    ],
)
def test_mistakes_of_hugging_face_jobs(override, expected):
    pytest.importorskip("transformers")
    assert expected in mistakes(JOBS / "verify" / "hf-llama.toml", override)


@pytest.mark.parametrize(
    ("name", "labels", "keys"),
    [
        ("hf-gpt2", "same", 4),
        ("hf-llama", "same", 0),
        ("hf-bert", "masked", 2),
        ("hf-vit", "classes", 0),
    ],
)
def test_hugging_face_models(name, labels, keys):
    pytest.importorskip("transformers")
    job = Job.load(JOBS / "verify" / f"{name}.toml")
    assert job.facts.labels == labels
    quiet, changed = job.model.without_dropout()
    assert len(changed) == keys
    assert quiet.without_dropout()[1] == []


def test_equal_seeds_give_equal_weights(write):
    job = Job.load(write())
    first, second = (build_model(job.model, 3, torch.float64) for _ in range(2))
    other = build_model(job.model, 4, torch.float64)
    assert torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert first.head.weight.dtype is torch.float64


def test_optimizer_gets_its_arguments(write):
    job = Job.load(write(), ["optimizer.name=SGD", "optimizer.momentum=0.5", "optimizer.lr=0.25"])
    optimizer = build_optimizer(job.optimizer, torch.nn.Linear(2, 2))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["momentum"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.25


def test_schedule():
    section = OptimizerSection(warmup=4, schedule="cosine", final_lr=0.1)
    rates = [rate(section, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[4:]))
    assert rate(OptimizerSection(), 7, 20) == 1.0


def saved_tokenizer(folder, *special):
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel({f"word{i}": i for i in range(290)} | {"[UNK]": 290}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_weights_want_the_tokenizer_that_they_were_trained_with(write, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    weights = f"model.weights={bare}"
    told = mistakes(write(), weights)
    assert "data.tokenizer" in told and "mean nothing to model.weights" in told and "save_pretrained" in told
    assert Job.load(write(), [weights, 'data.kind="tokens"']).data.kind == "tokens"
    given = saved_tokenizer(tmp_path / "given")
    for path in (given, given / "tokenizer.json"):
        assert Job.load(write(), [weights, f"data.tokenizer={path}"]).tokenizer == given / "tokenizer.json"
    # that beside the weights is theirs, whether these are named by file or by folder
    beside = saved_tokenizer(tmp_path / "beside")
    for path in (beside, beside / "model.safetensors"):
        assert Job.load(write(), [f"model.weights={path}"]).tokenizer == beside / "tokenizer.json"
    assert Job.load(write()).tokenizer is None
    assert Job.load(write(), [f"data.tokenizer={given}"]).tokenizer == given / "tokenizer.json"


def test_tokenizers_that_do_not_fit(write, tmp_path):
    assert "cannot be read" in mistakes(write(), f"data.tokenizer={tmp_path / 'none'}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in mistakes(write(), f"data.tokenizer={tmp_path}")
    given = f"data.tokenizer={saved_tokenizer(tmp_path / 'given')}"
    told = mistakes(write(), given, "model.vocab_size=280")
    assert "tokens up to number 290, but the model has a vocabulary of 280" in told
    bert = GOOD.replace('"gpt"', '"bert"')
    assert "fill in masked tokens" in mistakes(write(bert), given)
    masked = saved_tokenizer(tmp_path / "masked", "[MASK]")
    assert Job.load(write(bert), [f"data.tokenizer={masked}"]).tokenizer == masked / "tokenizer.json"
