"""A job's best plan on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.parallel.schedules import Timeline
from espalier.parallel.schedules.simulate import trace as as_trace
from espalier.planner import Cluster, Found, Recorder, Search
from espalier.planner.events import Step
from espalier.planner.explain import Checked, report, to_dict
from espalier.planner.prediction import plan_table
from espalier.planner.whole import check, checked, chosen, more_ranks, recordings, sensitivity, too_large
from espalier.train.building import batch_on_meta, on_meta
from espalier.train.job import AUTO, Job, parse_value
from espalier.train.plan_page import plan_page


@dataclass(frozen=True)
class Foresight:
    """What was found for a job.

    Attributes:
        result: of the search.
        text: all of it, told.
        table: all of it, as JSON takes it.
        timeline: the step of the best one's pipeline, if it has one, of at most three micro-batches a rank.
        of: the job's name.
        checked: the best ones' dry runs.
        changes: lines on what would change the choice.
        step: that of the best one, event by event, of as many micro-batches.
    """

    result: Found
    text: str
    table: dict[str, Any]
    timeline: Timeline | None = None
    of: str = ""
    checked: Sequence[Checked] = ()
    changes: Sequence[str] = ()
    step: Step | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return bool(self.result.best)

    def page(self) -> str:
        """All of it, as an HTML page, where something fits."""
        return plan_page(self.of, self.result, self.checked, self.changes, self.timeline, self.step)

    def trace(self) -> dict[str, Any]:
        """The step of the best one, as Perfetto opens it."""
        pipeline = {} if self.timeline is None else {"predicted": self.timeline}
        table = as_trace(pipeline)
        return {
            **table,
            "traceEvents": [*table["traceEvents"], *(self.step.trace(len(pipeline)) if self.step else ())],
        }


def foresee(
    job: Job,
    cluster: str,
    ranks: int | None = None,
    fix: Iterable[str] = (),
    memory: float = 0.92,
    *,
    quick: bool = False,
) -> Foresight:
    """Search the plans of a job.

    Args:
        job: its model, batch, optimizer, and of its plan what is not searched (precision, offload).
        cluster: the name of one that is shipped, or a file.
        ranks: how many of the cluster's; all by default.
        fix: ``key=value`` for each value of the plan that is not searched.
        memory: the share of a device's memory that may be taken.
        quick: the best ones are not run dry.

    Raises:
        ValueError: the cluster, or what is fixed, is wrong; says what.
    """
    fixed = {}
    for text in fix:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--fix {text}: expected key=value, as --fix tensor=8")
        fixed[key.strip().removeprefix("plan.")] = parse_value(value.strip())
    search, recorder = _search(job, cluster, ranks, fixed, memory)
    searched = search.run()
    dry: list[Checked] = []
    if searched.best and not quick:
        searched, dry = check(search, searched, recorder)
    if not searched.best:
        text = f"{report(searched, dry)}\n\n{too_large(searched, dry)}"
        enough = more_ranks(search)
        if enough is not None:
            text += f" With {enough} ranks something fits."
        return Foresight(searched, text, to_dict(searched, dry))
    changes, best = sensitivity(search, searched), searched.best[0]
    few = min(best.plan.accumulate, 3 * best.plan.pipe)
    timeline, step = search.timeline(best, few), search.step(best, few)
    text = report(searched, dry, changes, timeline, step)
    return Foresight(searched, text, to_dict(searched, dry), timeline, job.name, dry, changes, step)


def predicted(job: Job, cluster: str) -> tuple[Checked, Timeline | None]:
    """What a job's own plan takes on a cluster, run dry too, and the step of its pipeline, if it has one.

    Raises:
        ValueError: the cluster is wrong, or the plan has what is not priced.
    """
    search, recorder = _search(job, cluster, job.plan.world_size, {}, 1.0)
    prediction = search.of(job.plan)
    return checked(prediction, recorder), search.timeline(prediction, job.plan.accumulate)


def planned(job: Job, ranks: int | None = None) -> Job:
    """A job with ``[plan] auto = true`` with the plan that is best on its cluster.

    Args:
        job: what else [plan] says is not searched.
        ranks: how many; those that [plan] says, or all of the cluster's, by default.

    Raises:
        ValueError: nothing fits, or the cluster is wrong.
    """
    table = dict(job.raw["plan"])
    fixed = {key: value for key, value in table.items() if key not in (*AUTO, "precision", "offload", "clip")}
    search, _ = _search(job, table["cluster"], ranks or table.get("ranks"), fixed, 0.92)
    plan = chosen(search.run())
    return Job.from_dict({**job.raw, "plan": {**plan_table(plan), "why": plan.why}}, source=job.source)


def _search(
    job: Job, cluster: str, ranks: int | None, fixed: dict[str, Any], memory: float
) -> tuple[Search, Recorder]:
    where = Cluster.load(cluster)  # a mistake in it is told before a model is built
    model, plan, options = on_meta(job)
    optimizer, batch = options.pop("optimizer"), batch_on_meta(job)
    options["max_grad_norm"] = job.clip
    recorder = Recorder(model, optimizer, batch, options, recordings())
    search = Search(recorder, where, plan, ranks=ranks, fixed=fixed, memory=memory)
    return search, recorder
