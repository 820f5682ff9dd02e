"""Every model of the zoo under every plan, against one process in float64: what docs/zoo.md publishes.

The zoo is each architecture of transformers that can be built from a small config, the families of timm and
torchvision, and programs as researchers write them. Three steps of AdamW with clipping; compared are losses,
gradient norms, parameters and buffers. Each pair of a model and a plan ends exact, refused (with words that
say what to do), wrong, failed, or hung, and is noted in a file of JSON lines, from which a run that was
broken off goes on.

The bars: none is wrong, none hangs, 97 % are exact, every refusal says what to do.

    python benchmarks/zoo.py [--models PATTERN] [--plans PATTERN] [--sample K --seed N] [--only-failed]
        [--write docs/zoo.md | --compiled [BACKEND] | --rare | --varied]

With --compiled the blocks of each model are compiled, with --rare the plans are others, with --varied
transformers' models are given their tokens otherwise (padded, packed, embedded, ...): the page is of none of
these.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from _common import Row, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the zoo is the tests' own

from tests.pool import Pool, RankError
from tests.zoo.cases import GROUPS, absent, case, names
from tests.zoo.plans import PLANS, RARE, applies, plan_of, world
from tests.zoo.train import STEPS, TOLERANCE, TrialError, Verdict, reference, trial

ROOT = Path(__file__).resolve().parent.parent
LEAST = 0.97
ENDS = ("exact", "refused", "wrong", "failed", "hung")
MARKS = {"exact": "✓", "refused": "refused", "wrong": "**wrong**", "failed": "failed", "hung": "**hung**"}
INTRODUCTION = """\
Each model was trained for {steps} steps of AdamW with clipping, in float64, under each plan, and on one
process (torch {torch}, transformers {transformers}). *Exact*: losses, gradient norms, parameters and buffers
differ by less than {tolerance} of their size (where a change of 1e-15 of the parameters makes more than a
300th of that, by less than 300 times what it makes). *Refused*: an error of Espalier's own, in words.
*Failed*: any other error. The models are tiny, and otherwise as their libraries have them, with dropout off;
a model that draws random numbers is compared with the engine on one process."""
Pair = tuple[str, str]


@dataclass
class Result:
    """How a pair ended, and when."""

    model: str
    plan: str
    version: str
    seconds: float
    end: str
    words: str = ""
    where: str = ""
    gathered: Sequence[str] = ()

    @property
    def says_what_to_do(self) -> bool:
        """Whether a refusal has a remedy."""
        return Verdict(self.end, self.words).says_what_to_do  # type: ignore[arg-type]


@dataclass
class Book:
    """The results so far, the last of each pair, kept in a file."""

    path: Path
    last: dict[Pair, Result] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path.exists():
            for line in self.path.read_text("utf-8").splitlines():
                result = Result(**json.loads(line))
                self.last[result.model, result.plan] = result

    def add(self, result: Result) -> None:
        """Note a result."""
        with self.lock:
            self.last[result.model, result.plan] = result
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result), ensure_ascii=False) + "\n")


def version() -> str:
    """Changes with the library and with the zoo itself."""
    digest = hashlib.sha1()
    for path in sorted([*(ROOT / "espalier").rglob("*.py"), *(ROOT / "tests" / "zoo").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def pairs(
    models: str, plans: str, among: Iterable[str] = PLANS, groups: Iterable[str] = GROUPS
) -> dict[str, list[str]]:
    """The plans that each model is tried under, of those that patterns (with commas) name."""

    def named(name: str, patterns: str) -> bool:
        own = name.partition("/")[2] or name
        return any(fnmatch.fnmatchcase(x, p) for p in patterns.split(",") for x in (name, own))

    found = {}
    for group in groups:
        for name in names(group):
            if named(name, models):
                of = case(name)
                found[name] = [plan for plan in among if named(plan, plans) and applies(plan, of)]
    return found


class Runner:
    """Tries pairs on a pool of ranks, one after the other."""

    def __init__(self, book: Book, timeout: float, folder: Path, compile: bool | str = False) -> None:
        self.book, self.timeout, self.folder, self.version = book, timeout, folder, version()
        self.compile = compile
        self.pool = Pool(timeout, preload=["tests.zoo", "transformers.modeling_utils"])

    def model(self, name: str, plans: Iterable[str]) -> None:
        """One model under some plans: the one process first, then the plans by their number of ranks."""
        known: dict[int, Verdict | Path] = {}
        for plan in sorted(plans, key=world):
            accumulate = plan_of(plan).get("accumulate", 1)
            start = time.monotonic()
            if isinstance(known.get(1), Verdict):  # it is no other for micro-batches
                known[accumulate] = known[1]
            if accumulate not in known:
                file = self.folder / f"{name.replace('/', '-')}-{accumulate}.pt"
                end = self.called(1, reference, name, accumulate, file)
                known[accumulate] = file if end.end == "exact" else Verdict("unfit", end.words, end.where)
            kept = known[accumulate]
            verdict = kept if isinstance(kept, Verdict) else self.tried(name, plan, kept)
            result = Result(name, plan, self.version, round(time.monotonic() - start, 1), **asdict(verdict))
            self.book.add(result)
            print(f"{result.end:8} {name:45} {plan:14} {result.seconds:5.1f} s  {told(result)}", flush=True)
        for kept in known.values():
            if isinstance(kept, Path):
                kept.unlink(missing_ok=True)

    def tried(self, name: str, plan: str, kept: Path) -> Verdict:
        """How a pair ended. What does not end in time gets three times as much before it counts as hung."""
        for patience in (1, 3):
            verdict = self.called(
                world(plan), trial, name, plan_of(plan), kept, self.compile, timeout=patience * self.timeout
            )
            if verdict.end != "hung":
                break
        return verdict

    def called(self, ranks: int, function: Any, *args: Any, timeout: float | None = None) -> Verdict:
        """How a call on ranks ended: as one of them did that was not exact, if any."""
        try:
            found = [v for v in self.pool(ranks, function, *args, timeout=timeout) if v is not None]
        except RankError as error:
            if isinstance(error.original, TrialError):
                return error.original.verdict
            text = str(error)
            return Verdict("hung" if "no answer from ranks" in text else "failed", text[:3000])
        return next((v for v in found if v.end != "exact"), found[0] if found else Verdict("exact"))


def told(result: Result, length: int = 150) -> str:
    """The beginning of its words."""
    words = " ".join(result.words.split())
    return words if len(words) <= length else words[: length - 1] + "…"


# ---- the page


def counted(results: Iterable[Result]) -> list[str]:
    """How many ended each way, and the share that is exact."""
    ends = Counter(r.end for r in results)
    n = sum(ends.values())
    return [str(n), *(str(ends[end]) for end in ENDS), f"{ends['exact'] / n:.1%}" if n else "–"]


def totals(results: Sequence[Result]) -> list[Row]:
    """By plan, by group, and of all."""
    rows: list[Row] = [("", "pairs", *ENDS, "exact of all")]
    for plan in (*PLANS, *RARE):
        if of := [r for r in results if r.plan == plan]:
            rows.append((plan, *counted(of)))
    for group in GROUPS:
        if of := [r for r in results if r.model.startswith(group + "/")]:
            rows.append((f"*{group}*: {len({r.model for r in of})} models", *counted(of)))
    rows.append((f"all: {len({r.model for r in results})} models", *counted(results)))
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A table."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|".join(["", "---", *["--:"] * (len(rows[0]) - 1), ""]), *rest])


def grouped(results: Iterable[Result]) -> list[str]:
    """Pairs that ended with the same words, in a list."""
    by: dict[str, list[Result]] = {}
    for r in results:
        by.setdefault(told(r, 400), []).append(r)
    lines = []
    for words, of in sorted(by.items(), key=lambda item: -len(item[1])):
        plans: dict[str, list[str]] = {}
        for r in of:
            plans.setdefault(r.model, []).append(r.plan)
        which = "; ".join(f"{model} ({', '.join(under)})" for model, under in plans.items())
        where = f" (`{of[0].where}`)" if of[0].where else ""
        lines.append(f"- {which}: {code(words)}{where}")
    return lines


def code(words: str) -> str:
    """Words as they were said, whatever signs are in them."""
    fence = "``" if "`" in words else "`"
    return f"{fence} {words} {fence}" if fence == "``" else f"`{words}`"


def page(results: Sequence[Result], unfit: Sequence[Result], bars: Sequence[str]) -> str:
    """docs/zoo.md."""
    import torch
    import transformers

    lines = [
        "# The zoo",
        "",
        "*Written by `python benchmarks/zoo.py --write docs/zoo.md`.*",
        "",
        INTRODUCTION.format(
            steps=STEPS,
            tolerance=f"{TOLERANCE:g}",
            torch=torch.__version__.partition("+")[0],
            transformers=transformers.__version__,
        ),
        "",
        *(f"- {bar}" for bar in bars),
        "",
        *versions(results),
        markdown(totals(results)),
        "",
        "The plans: " + "; ".join(f"*{name}* `{plan}`" for name, plan in PLANS.items()) + ".",
        "",
    ]
    for end in ("wrong", "hung", "failed", "refused"):
        if of := [r for r in results if r.end == end]:
            lines += [f"## {end.capitalize()}", "", *grouped(of), ""]
    lines += ["## Every pair", ""]
    ends = {(r.model, r.plan): r.end for r in results}
    for group in GROUPS:
        rows: list[Row] = [(group, *PLANS)]
        for model in sorted({r.model for r in results if r.model.startswith(group + "/")}):
            marks = (MARKS.get(ends.get((model, plan), ""), "") for plan in PLANS)
            rows.append((model.partition("/")[2], *marks))
        if len(rows) > 1:
            lines += [markdown(rows), ""]
    if unfit:
        words = {r.model: told(r, 200) for r in unfit}
        lines += [
            "## Not in the zoo",
            "",
            "These cannot be trained on one process either as they are built here:",
            "",
            *(f"- {model}: {code(said)}" for model, said in words.items()),
            "",
        ]
    missing = [said for group in GROUPS if (said := absent(group))]
    return "\n".join([*lines, *missing]).rstrip() + "\n"


def versions(results: Iterable[Result]) -> list[str]:
    """Where the code changed between pairs: how many were run on which."""
    counted = Counter(r.version for r in results).most_common()
    if len(counted) < 2:
        return []
    told = ", ".join(f"{n:,} on {name}" for name, n in counted)
    return [f"The code was mended while they were tried; by a digest of it, there are {told}.", ""]


def bars(results: Sequence[Result]) -> tuple[list[str], bool]:
    """What is claimed, in words, and whether all of it holds."""
    ends = Counter(r.end for r in results)
    share = ends["exact"] / len(results) if results else 0.0
    mute = [r for r in results if r.end == "refused" and not r.says_what_to_do]
    claims = [
        (f"{ends['wrong']} of {len(results)} pairs are wrong (bar 0)", not ends["wrong"]),
        (f"{ends['hung']} hang (bar 0)", not ends["hung"]),
        (f"{share:.1%} are exact (bar {LEAST:.0%})", share >= LEAST),
        (f"{len(mute)} of {ends['refused']} refusals do not say what to do (bar 0)", not mute),
    ]
    return [f"{'PASS' if holds else 'MISS'}: {words}" for words, holds in claims], all(h for _, h in claims)


def main() -> int:
    """Run what is not known yet, then show (and write) what is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="*", help="patterns of names, with commas: 'llama,programs/*'")
    parser.add_argument("--plans", default="*", help="patterns of names of plans, with commas")
    parser.add_argument("--rare", action="store_true", help="plans that are rarely combined, in their place")
    parser.add_argument("--varied", action="store_true", help="other inputs: padded, packed, embedded, ...")
    parser.add_argument("--sample", type=int, help="so many pairs, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-failed", action="store_true", help="run again what did not end exact")
    parser.add_argument("--any-version", action="store_true", help="results of other versions count too")
    parser.add_argument("--report", action="store_true", help="run nothing: show the results that are there")
    parser.add_argument("--results", type=Path, help="by default .espalier/zoo.jsonl, by backend")
    parser.add_argument("--compiled", nargs="?", const="inductor", metavar="BACKEND", help="compile blocks")
    parser.add_argument("--jobs", type=int, default=1, help="pools of ranks that run at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a pair")
    parser.add_argument("--write", type=Path, help="the page")
    given = parser.parse_args()
    if given.write is not None and (given.compiled or given.rare or given.varied):
        parser.error("--write: the page is of usual plans and inputs; leave --compiled, --rare, --varied out")
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for said in filter(None, map(absent, GROUPS)):
        print(f"skipped: {said}")
    groups = ("varied",) if given.varied else GROUPS
    wanted = pairs(given.models, given.plans, RARE if given.rare else PLANS, groups)
    asked = [(model, plan) for model, plans in wanted.items() for plan in plans]
    if given.sample is not None:
        asked = random.Random(given.seed).sample(asked, min(given.sample, len(asked)))
    file = (
        "-".join(filter(None, ("zoo", given.rare and "rare", given.varied and "varied", given.compiled)))
        + ".jsonl"
    )
    book, now = Book(given.results or ROOT / ".espalier" / file), version()
    ready = given.any_version or given.only_failed
    run = [] if given.report else [
        pair for pair in asked
        if (old := book.last.get(pair)) is None
        or (old.version != now and not ready)
        or (given.only_failed and old.end not in ("exact", "unfit"))
    ]  # fmt: skip
    tried(run, book, given.jobs, given.timeout, given.compiled or False)
    known = [book.last[pair] for pair in asked if pair in book.last]
    results, unfit = [r for r in known if r.end != "unfit"], [r for r in known if r.end == "unfit"]
    claims, held = bars(results)
    print()
    print(table(totals(results)))
    print()
    for line in [*grouped(r for r in results if r.end != "exact"), "", *claims]:
        print(line)
    if given.write is not None:
        given.write.write_text(page(results, unfit, claims), "utf-8")
    return 0 if held else 1


def tried(run: Sequence[Pair], book: Book, jobs: int, timeout: float, compile: bool | str) -> None:
    """Try pairs, model by model, on so many pools at a time."""
    waiting: SimpleQueue[tuple[str, list[str]]] = SimpleQueue()
    by: dict[str, list[str]] = {}
    for model, plan in run:
        by.setdefault(model, []).append(plan)
    for item in by.items():
        waiting.put(item)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(book, timeout, Path(folder), compile)
            try:
                while True:
                    runner.model(*waiting.get_nowait())
            except Empty:
                pass
            finally:
                runner.pool.close()

    workers = [threading.Thread(target=work) for _ in range(min(jobs, len(by)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    sys.exit(main())
