"""Job files: what is accepted, and that every mistake is told, at once and clearly."""

import subprocess
import sys
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from espalier.parallel import Plan
from espalier.train.building import build_model, check_buildable
from espalier.train.job import Job, JobError, parse_value, shipped_jobs
from espalier.train.names import config_typos, optimizers
from espalier.train.optimizers import build_optimizer, rate
from espalier.train.sections import OptimizerSection

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


@pytest.mark.parametrize("name", shipped_jobs())
def test_every_shipped_job(name):
    if name.startswith(("hf-", "llama")):
        pytest.importorskip("transformers")
    job = Job.load(name)
    assert check_buildable(job) > 0
    assert Job.from_dict(job.raw, source=job.source) == job


def test_a_shipped_job_is_taken_by_its_name_where_no_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt").mkdir()  # a folder is no job
    assert Job.load("gpt").name == "gpt"
    assert "there is no folder jobs; did you mean the shipped gpt?" in mistakes("jobs/gpt.toml")
    assert "did you mean 'hf-llama'?" in mistakes("hf-lama")
    assert "those that are shipped are demo, gpt, gpt2" in mistakes("something")
    (tmp_path / "moe").write_text(GOOD)
    assert Job.load("moe").model.kind == "gpt"


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
    assert job.plan == Plan(data=4)
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
        "model.hiden = 32: unknown key; did you mean model.hidden?",
        "data.kind = 'txt' (from --set): expected one of text, tokens, images, image-folder, module; did you",
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
    assert "model.kind: is missing; expected one of gpt, gpt2, moe, bert, vit, hf, hugg" in text


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
    assert expected in mistakes("hf-llama", override)


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
    job = Job.load(name)
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


def test_schedules_that_go_down():
    linear = OptimizerSection(schedule="linear", final_lr=0.0)
    assert [rate(linear, step, 5) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    late = OptimizerSection(schedule="wsd", warmup=2, cooldown=0.3, final_lr=0.1)
    rates = [rate(late, step, 10) for step in range(10)]
    assert rates[:8] == [0.5, *[1.0] * 7] and rates[8:] == pytest.approx([0.55, 0.1])


def test_groups_of_parameters(write):
    text = GOOD + '[[optimizer.groups]]\npattern = "head.*"\nlr = 0.5\n'
    job = Job.load(write(text), ["optimizer.weight_decay=0.1"])
    model = build_model(job.model, 0, torch.float32)
    optimizer = build_optimizer(job.optimizer, model)
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(of) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        group = of[id(p)]
        assert group["lr"] == (0.5 if name.startswith("head.") else 1e-3), name
        assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0), name
    everywhere = Job.load(write(), ["optimizer.weight_decay=0.1", "optimizer.decay=all"])
    assert len(build_optimizer(everywhere.optimizer, model).param_groups) == 1
    muon = Job.load(write(), ["optimizer.name=Muon", "optimizer.rest={lr=1e-4}"])
    built = build_optimizer(muon.optimizer, model)
    parts = built.param_groups
    outside = {id(p) for n, p in model.named_parameters() if p.ndim < 2 or n.startswith(("embed", "head"))}
    assert {id(p) for group in built.parts[1].param_groups for p in group["params"]} == outside
    assert {group["lr"] for group in parts} == {1e-3, 1e-4}
    told = mistakes(write(text.replace("lr = 0.5", "rl = 0.5")), "optimizer.rest={lr=1.0}")
    assert "optimizer.groups[0].rl = 0.5: unknown key; did you mean optimizer.groups[0].lr?" in told
    assert "optimizer.rest" in told and "is for the parameters that Muon leaves" in told


def test_names_read_from_source_are_those_of_torch():
    known = optimizers()
    assert {"AdamW", "Muon", "Adafactor", "SGD"} <= known.keys() and "LBFGS" not in known
    for name, arguments in known.items():
        assert set(arguments) == set(signature(getattr(torch.optim, name)).parameters) - {"params"}, name


def test_mistakes_are_told_without_torch(write):
    """To import it takes seconds."""
    path = write(GOOD.replace("layers", "layrs"))
    code = f"""
import sys
from espalier.train.job import Job, JobError
try:
    Job.load({str(path)!r}, ["optimizer.name=Adam", "optimizer.lrr=3", "plan.tensr=2"])
except JobError as error:
    print(error)
assert "torch" not in sys.modules
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for line in ("did you mean model.layers?", "did you mean optimizer.lr?", "plan.tensr = 2"):
        assert line in told


def test_typos_in_configs_of_transformers_are_told_without_it():
    code = """
import sys
from espalier.train.job import Job, JobError
for override in ("model.config.hiden_size=66", "model.config.num_atention_heads=3", "model.clas=1"):
    try:
        Job.load("hf-llama", [override])
    except JobError as error:
        print(error)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    pytest.importorskip("transformers")
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.count("did you mean model.c") == 3
    for name in ("hf-bert", "hf-gpt2", "hf-vit", "hf-llama"):
        raw = Job.load(name).raw["model"]
        assert config_typos(raw["class"], None, raw["config"]) == []
    assert config_typos("LlamaForCausalLM", None, {"rope_theta": 1.0, "quite_other": 2}) == []


def test_models_of_a_local_folder(write, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    tables = {"model": {"kind": "hf", "path": str(tmp_path / "hf")}, "data": {"kind": "tokens"}}
    tables["train"] = {"sequence": 16}
    job = Job.from_dict(tables)
    assert job.model.name == "GPT2LMHeadModel" and job.weights == str(tmp_path / "hf")
    assert check_buildable(job) > 0 and job.facts.max_positions == 32
    fresh = Job.from_dict({**tables, "model": {**tables["model"], "fresh": True, "config": {"n_layer": 2}}})
    assert fresh.weights is None and fresh.model.config_object().n_layer == 2
    bert = {"kind": "hf", "task": "masked-lm", "config": {"model_type": "bert", "vocab_size": 300}}
    assert Job.from_dict({**tables, "model": bert}).model.name == "BertForMaskedLM"
    for model, told in (
        ({"path": "nowhere"}, "expected a local folder with a config.json"),
        ({}, "give a class of transformers"),
        ({"config": {"model_type": "lama"}}, "did you mean 'llama'?"),
        ({"class": "LlamaForCausalLM", "lora": {}}, "adapters are for a model that has weights"),
        ({"path": str(tmp_path / "hf"), "lora": {"rnk": 2}}, "did you mean model.lora.rank?"),
    ):
        with pytest.raises(JobError) as caught:
            Job.from_dict({**tables, "model": {"kind": "hf", **model}})
        assert told in str(caught.value), model


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
    (beside / "model.safetensors").touch()
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
