"""Follow the pages as their reader does: from the wheel, in an empty environment and an empty folder.

    python tools/walk.py                                 README.md and all of docs, in some twenty minutes
    python tools/walk.py docs/formats.md docs/report.md  some of them
    python tools/walk.py --python env/bin/python         an environment that is there
    python tools/walk.py -- torch==2.13.0                arguments of `pip install`

Runs the Python blocks of each page (four ranks, `docs/run.py`), then every command that a page shows:
indented lines, `$` lines of console blocks, and those in backticks that are whole. What a page calls the
reader's own (`./my-llama`, `chats.jsonl`, `JOB.toml`, ...) is made first. Commands that name files of a
clone are left out, as docs/first-run.md says. Exit code 1 where a command ends otherwise than the page has
it, or prints other words than its console block. What was printed lies in `walk.log` of the folder
(`--folder`; else one that goes in the end).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT = 600.0  # seconds of a command
EXTRAS = "hf,data,report,track"

# what is the reader's, made in the environment that is walked
OWN = """
import json, random, shutil
from pathlib import Path
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = "the tree grows along a lattice and its branches are cut so that fruit is near who what you".split()
names = ["<unk>", "<user>", "<assistant>", "<end>", *words]
tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
)
fast.chat_template = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
)
LlamaForCausalLM(config).save_pretrained("my-llama")
fast.save_pretrained("my-llama")
shutil.copytree("my-llama", "hub")  # as it was loaded from there
draw = random.Random(0)

def said(n):
    return " ".join(draw.choices(words, k=n))

talks = [
    {"messages": [{"role": "user", "content": said(5)}, {"role": "assistant", "content": said(6)}]}
    for _ in range(2000)
]
Path("chats.jsonl").write_text("\\n".join(map(json.dumps, talks)))
"""

JOB = """
[model]
kind = "hf"
path = "my-llama"
[data]
source = "chats.jsonl"
chat = "messages"
rows = "padded"
[plan]
data = 2
[train]
steps = 6
batch_size = 256
sequence = 32
eval_every = 3
track = ["tensorboard", "wandb"]
[checkpoint]
every = 3
"""

BAD = '[model]\nkind = "gpt"\nhidden = 128\nheads = 5\n[train]\nstepz = 4\n'
TABLE = "0F0,0F1,,,0B1,0B0\n,1F0,1F1,1B1,1B0\n"
OLD = """import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 4))
"""
SCRIPT = """import os
import espalier

mesh = espalier.Mesh.from_env({"data": int(os.environ["WORLD_SIZE"])})
if mesh.rank == 0:
    print(mesh)
"""

CLUSTER = """
from espalier.planner import Cluster
from pathlib import Path
cluster = Cluster.load("h100-sxm")
Path("mine.toml").write_text(cluster.model_copy(update={"level": cluster.level[:1]}).to_toml())
"""

# names that stand on pages for something of the reader's
STANDS = {
    "JOB.toml": "job.toml",
    "FILE": "job.toml",
    "SCRIPT.py": "script.py",
    "TEXT": "the tree",
    "RUN": "runs/job",
    "runs/a": "runs/job",
    "runs/b": "runs/tune",
    "A": "runs/job",
    "B": "runs/tune",
    "DIR": "runs/job/checkpoints",
    "FROM": "runs/job/checkpoints",
    "TO": "to",
    "CHECKPOINT": "runs/job/checkpoints",
    "path/of/the/config": "my-llama",
    "NAME": "mine.toml",
    "first:29500": "127.0.0.1:29500",
}
CODES = {
    "espalier train bad.toml": 2,
    "espalier migrate train.py": (0, 1),
    "espalier migrate script.py": (0, 1),
}
CLONE = re.compile(r"\b(examples|benchmarks|tests|docs)/|\.\.\.|\[|page\.py")
COMMAND = re.compile(r"^(?:    |\$ )(?:(first|second)\$ +)?(?:\S*bin/)?(espalier .+)$")
INLINE = re.compile(r"`(?:\S*bin/)?(espalier [^`\n]+)`")


@dataclass
class Walk:
    """An environment, a folder, and what went otherwise.

    Attributes:
        bin: the environment's commands.
        folder: where they are called.
        wrong: of each command that ended otherwise, what was seen.
        seen: commands that were run.
    """

    bin: Path
    folder: Path
    wrong: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        """Nothing of the clone."""
        kept = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        path = f"{self.bin}:{kept['PATH']}"
        return {
            **kept,
            "PATH": path,
            "COLUMNS": "120",
            "BROWSER": "true",
            "ESPALIER_CACHE": str(self.folder.parent / "cache"),  # of a machine that others use
        }  # `--open` has one that shows nothing

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Begin a command in the folder, in a group of its own."""
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str], limit: float = LIMIT) -> tuple[int, str]:
        """Wait for it: exit code, and what it printed."""
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed = process.communicate()[0] + f"\n(killed after {limit:.0f} s)"
        return process.returncode, printed

    def tell(self, page: str, command: str, code: int, printed: str, began: float, wrong: str) -> None:
        """Note how a command ended."""
        with (self.folder / "walk.log").open("a", encoding="utf-8") as log:
            log.write(f"==== {page}: {command}\n{printed}\n(exit code {code})\n")
        mark = "WRONG" if wrong else "well"
        print(f"{mark:5} {time.monotonic() - began:6.1f} s  {page}: {command}", flush=True)
        if wrong:
            print("  " + "\n  ".join(wrong.splitlines()[-25:]), flush=True)
            self.wrong.append(f"{page}: {command}")

    def prepare(self) -> None:
        """Make what is the reader's own."""
        texts = {"job.toml": JOB, "bad.toml": BAD, "mine.csv": TABLE, "train.py": OLD, "script.py": SCRIPT}
        for name, text in texts.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / "own.py").write_text(OWN, encoding="utf-8")
        first = [
            [str(self.bin / "python"), "own.py"],
            shlex.split(
                "espalier init tune.toml --model ./my-llama --data chats.jsonl --chat messages -n 2 --steps 8"
            ),
            shlex.split("espalier train job.toml"),
            shlex.split("espalier train tune.toml"),
            shlex.split(
                "espalier export runs/job/checkpoints megatron/iter_0001000 --format megatron --like my-llama"
            ),
            shlex.split("espalier demo --set train.steps=8"),
            # a cluster of theirs
            [str(self.bin / "python"), "-c", CLUSTER],
        ]
        for command in first:
            began = time.monotonic()
            code, printed = self.end(self.start(command))
            self.tell("(before)", shlex.join(command), code, printed, began, printed if code else "")

    def command(self, page: str, shown: str, expected: Sequence[str] | None) -> None:
        """Run a command of a page once, and compare it with what stands below it."""
        words = [STANDS.get(word, word) for word in shlex.split(shown, comments=True)]
        if words[1] == "calibrate":  # others may compute meanwhile
            words.append("--anyway")
        if "--resume" in words:  # a run that has come to its end
            words += ["--set", "train.steps=12"]
        command = shlex.join(words)
        if command in self.seen:
            return
        self.seen.add(command)
        self.make_room(words)
        began = time.monotonic()
        process = self.start(words)
        if words[1] == "watch":
            code, printed = self.watched(process)
        else:
            code, printed = self.end(process)
        right = CODES.get(shown, 0)
        wrong = ""
        if code not in (right if isinstance(right, tuple) else (right,)):
            wrong = f"{printed}\nexit code {code}, expected {right}"
        elif expected is not None and [line.rstrip() for line in printed.splitlines()] != list(expected):
            wrong = "\n".join(["printed", printed, "but the page says", *expected])
        self.tell(page, command, code, printed, began, wrong)
        if words[1] == "init" and words[2:3] != ["tune.toml"]:
            (self.folder / "job.toml").write_text(JOB, encoding="utf-8")

    def make_room(self, words: Sequence[str]) -> None:
        """What a command writes is not there yet for a reader who has an own folder for each page."""
        if words[1] == "init":
            name = words[2] if len(words) > 2 else "job.toml"
        elif words[1] in ("export", "import"):
            name = words[3]
        elif words[1] == "train" and "--resume" not in words:
            name = f"runs/{Path(words[2]).stem}"
        else:
            return
        subprocess.run(["rm", "-rf", str(self.folder / name)], check=True)

    def watched(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Look at the page that `espalier watch` shows, then Ctrl-C."""
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        if address:
            with urllib.request.urlopen(address[0], timeout=20) as answer:
                line += f"a page of {len(answer.read()):,} bytes\n"
        os.killpg(process.pid, signal.SIGINT)
        code, rest = self.end(process, 20)
        return (code if address else 1), line + rest

    def together(self, page: str, machines: Sequence[str]) -> None:
        """Commands of several machines, all on this one."""
        began = time.monotonic()
        ready = [shlex.split(" ".join(STANDS.get(w, w) for w in shown.split())) for shown in machines]
        for words in ready:
            self.make_room(words)
        processes = [self.start(words) for words in ready]
        for words, process in zip(ready, processes, strict=True):
            code, printed = self.end(process)
            self.tell(page, shlex.join(words), code, printed, began, printed if code else "")

    def blocks(self, pages: Sequence[Path]) -> None:
        """The Python blocks of all pages, from the folder."""
        named = []
        for page in pages:  # what is printed has the names of pages, as the clone has them
            text = page.read_text("utf-8")
            if "```python" in text:
                copy = self.folder / page.relative_to(ROOT)
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(text, encoding="utf-8")
                named.append(str(page.relative_to(ROOT)))
        if not named:
            return
        began = time.monotonic()
        command = ["espalier", "run", "-n", "4", str(ROOT / "docs/run.py"), *named]
        code, printed = self.end(self.start(command), 1800)
        self.tell("Python blocks", f"{len(named)} pages", code, printed, began, printed if code else "")


def commands(page: Path) -> Iterator[tuple[str, str, list[str] | None]]:
    """A page's commands: on which machine ("" for this), which, and what it prints where that is shown."""
    text = page.read_text("utf-8")
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    consoles = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for console in consoles:
        first, _, rest = console.partition("\n")
        if found := COMMAND.match(first):
            yield "", found[2], rest.splitlines()
    text = re.sub(r"^```console\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        if found := COMMAND.match(line):
            # what stands behind is said of it
            yield found[1] or "", re.split(r" {2,}", found[2].strip())[0], None
    for shown in INLINE.findall(text):
        words = shown.split()
        whole = any(not word.startswith("-") for word in words[2:]) and not words[2].startswith("--format")
        if whole or words[1] in ("demo", "doctor", "--version", "--help"):
            yield "", shown, None


def walk(bin_: Path, folder: Path, pages: Sequence[Path], parts: Sequence[str]) -> int:
    """All of it; 1 where something went otherwise."""
    path = Walk(bin_, folder)
    if "blocks" in parts:
        path.blocks(pages)
    if "commands" in parts:
        if not (folder / "job.toml").exists():  # else a walk in this folder goes on
            path.prepare()
        for page in pages:
            name = str(page.relative_to(ROOT))
            machines = []
            for block in re.findall(
                r"^```python\n# (examples/\S+)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S
            ):
                (folder / "examples").mkdir(exist_ok=True)
                (folder / block[0]).write_text(block[1], encoding="utf-8")
            for machine, shown, expected in commands(page):
                if CLONE.search(shown) and expected is None:
                    continue
                if machine:
                    machines.append(shown)
                else:
                    path.command(name, shown, expected)
            if machines:
                path.together(name, machines)
    print(f"{len(path.wrong)} went otherwise" if path.wrong else "all as the pages say")
    return int(bool(path.wrong))


def installed(folder: Path, words: Sequence[str]) -> Path:
    """The commands of an empty environment with the wheel."""
    os.environ.pop("PYTHONPATH", None)  # pip takes what it finds there for installed
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    bin_ = folder / "env/bin"
    subprocess.run([bin_ / "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]", *words], check=True)
    return bin_


def main() -> int:
    """Read what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    parser.add_argument("--python", type=Path, help="of an environment that has the wheel")
    parser.add_argument("--folder", type=Path, help="to work in, which stays; empty, or of a walk before")
    parser.add_argument("--only", choices=["blocks", "commands"], action="append")
    typed = sys.argv[1:]
    end = typed.index("--") if "--" in typed else len(typed)
    asked, words = parser.parse_args(typed[:end]), typed[end + 1 :]
    with tempfile.TemporaryDirectory() as name:
        bin_ = asked.python.absolute().parent if asked.python else installed(Path(name), words)
        folder = asked.folder or Path(name) / "walked"
        folder.mkdir(parents=True, exist_ok=True)
        pages = [page.resolve() for page in asked.pages]
        return walk(bin_, folder.resolve(), pages, asked.only or ["blocks", "commands"])


if __name__ == "__main__":
    sys.exit(main())
