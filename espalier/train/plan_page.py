"""What a search for a plan found, as one page that needs nothing beside itself, and no script.

Its style is that of a run's page (``pages/run.css``). All pictures are SVG, with a sentence for who does not
see them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from espalier.parallel.schedules import Timeline
from espalier.planner import Found
from espalier.planner.compare import Comparison, off_by
from espalier.planner.events import Happening, Step, lanes
from espalier.planner.explain import Checked, origins, to_toml, why_not, words
from espalier.planner.prediction import Prediction, plan_table
from espalier.train.metrics import readable_bytes
from espalier.train.page import style

SHOWN = 8
"""Plans in the tables."""
DOTS = 1500
"""Plans in the chart; of more a part, evenly."""

# which colour of the page's style
_TERMS = {"compute": 0, "host": 3, "bubble": 6, "data": 1, "tensor": 2, "context": 4, "update": 5}
_TERMS |= {"offload": 7}
_KINDS = {"parameters": 0, "gradients": 1, "states": 2, "activations": 3, "transient": 4}
_ACTIONS = {"F": "forward", "B": "backward", "I": "backward, of inputs", "W": "of weights"}


def plan_page(
    name: str,
    searched: Found,
    checked: Sequence[Checked] = (),
    changes: Sequence[str] = (),
    timeline: Timeline | None = None,
    step: Step | None = None,
) -> str:
    """The page.

    Args:
        name: of the job.
        searched: with at least one plan that fits.
        checked: the best ones' dry runs.
        changes: lines on what would change the choice.
        timeline: of the best one's pipeline, if it has one, maybe of fewer micro-batches than its own.
        step: that of the best one, event by event, of as many.
    """
    first = searched.best[0]
    cluster = searched.cluster
    title = f"Plan for {name}"
    rows = f"{first.rows} row{'s' * (first.rows != 1)}"
    what = (
        f"{words(first.plan)}, micro-batches of {rows}, on {first.plan.world_size:,} ranks of "
        f"{cluster.device.kind}; the best of {searched.scored:,} plans scored."
    )
    sections = [
        _figures(searched),
        _section("best", "The best plans", _best(searched)),
        _section("time", "What a step's time goes to", _stacks(_rows(searched), "terms", _TERMS, _seconds)),
        _section(
            "memory", "Memory of the fullest rank", _stacks(_rows(searched), "memory", _KINDS, readable_bytes)
        ),
        _section("ranks", "Memory along the pipeline", _ranks(first)) if len(first.by_rank) > 1 else "",
        _section("pareto", "Time against memory", _pareto(searched)),
        _section("pipeline", "The pipeline's step", _pipeline(first, timeline)) if timeline else "",
        _section("step", "A step, event by event", _step(first, step)) if step else "",
        _section("why", "Why not another", _list(why_not(searched))),
        _section("changes", "What would change it", _list(changes)) if changes else "",
        _section("dry", "Run dry", _dry(checked)) if checked else "",
        _section("plan", "The plan, to paste into a job", _pre(to_toml(plan_table(first.plan)))),
        _section("known", "From where the figures are", _pre("\n".join(origins(searched)))),
    ]
    return _document("espalier plan", title, what, sections, ("best", "plans"))


def compare_page(name: str, compared: Comparison, timeline: Timeline | None = None) -> str:
    """The page of a prediction beside a run.

    Args:
        name: of the job.
        compared: both.
        timeline: what was predicted of its pipeline, if it has one.
    """
    predicted, real = compared.predicted, compared.measured
    title = f"Plan and run of {name}"
    what = (
        f"{words(predicted.plan)}: {_seconds(predicted.seconds)} a step predicted, "
        f"{_seconds(real.seconds)} measured, {compared.error:+.1%}; {real.steps} steps, "
        f"whose middle half is {real.scatter:.1%} apart."
    )
    bars = [("", "predicted", predicted.terms), ("", "measured", real.terms)]
    tables = compared.rows()
    sections = [
        _section("time", "What a step's time goes to", _bars("time", bars, _TERMS, _seconds)),
        _section("terms", "Term by term", _compared("time", tables["time"], _seconds)),
        _section(
            "memory", "Memory of the fullest rank", _compared("memory", tables["memory"], readable_bytes)
        ),
        _section("sent", "Sent by a rank in a step", _compared("bytes sent", tables["sent"], readable_bytes)),
    ]
    for key, heading, of in (
        ("predicted", "The pipeline's step, predicted", timeline),
        ("measured", "The pipeline's step, measured", real.timeline),
    ):
        if of is not None:
            sections.append(_section(key, heading, _pipeline(predicted, of)))
    return _document("espalier compare", title, what, sections, ("time", "times"))


def _compared(what: str, rows: Sequence[tuple[str, float, float]], say: Callable[[float], str]) -> str:
    lines = [(name, say(x), say(y), off_by(x, y)) for name, x, y in rows]
    return _table(f"{what}, predicted and measured", ("", "predicted", "measured", "off by"), lines, 1)


def _document(brand: str, title: str, what: str, sections: Iterable[str], first: tuple[str, str]) -> str:
    """A page; ``first`` is the section that is skipped to, and what it has."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)} · espalier</title>
<style>{style()}
section.wide {{ margin-top: 44px; }} .dot {{ fill: var(--faint); opacity: .35; }}
td.n {{ white-space: nowrap; }} .front {{ fill: none; stroke: var(--green); stroke-width: 1.6; }}
.chosen {{ fill: var(--rust); }}
</style>
</head>
<body>
<a class="skip" href="#{first[0]}">Skip to the {first[1]}</a>
<header><p class="brand">{_text(brand)}</p><h1>{_text(title)}</h1><p class="what">{_text(what)}</p></header>
<main>
{"".join(sections)}
</main>
</body>
</html>
"""


# ---- pieces of the page


def _text(value: object) -> str:
    return html.escape(str(value))


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _section(key: str, heading: str, body: str) -> str:
    return (
        f'<section class="wide" id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">{_text(heading)}</h2>{body}</section>\n'
    )


def _pre(text: str) -> str:
    return f'<pre tabindex="0">{_text(text)}</pre>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(line)}</li>" for line in lines) + "</ul>"


def _table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]], text: int) -> str:
    """A table whose first ``text`` columns are words and whose others are numbers; cells may have lines."""
    numeric = [' class="n"' if i >= text else "" for i in range(len(head))]
    top = "".join(f'<th scope="col"{c}>{_text(x)}</th>' for x, c in zip(head, numeric, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{_lines(x)}</td>" for x, c in zip(row, numeric, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(label)}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _lines(cell: str) -> str:
    return "<br>".join(map(_text, cell.split("\n")))


def _rows(searched: Found) -> list[tuple[str, Prediction]]:
    """The best, and pure data parallelism and ZeRO-3 where they are none of them, each with its name."""
    best = list(searched.best[:SHOWN])
    plain = [x for x in searched.plain if all(x is not y for y in best)]
    return [(f"{i + 1}", x) for i, x in enumerate(best)] + [("plain", x) for x in plain]


def _figures(searched: Found) -> str:
    first = searched.best[0]
    plain = min((x for x in searched.plain if x.fits), key=lambda x: x.seconds, default=first)
    boxes = [
        ("step", _seconds(first.seconds), f"± {first.error:.0%}"),
        ("samples a second", f"{searched.batch / first.seconds:,.4g}", f"{searched.batch:,} a step"),
        (
            "fullest rank",
            readable_bytes(first.bytes),
            f"of {readable_bytes(searched.cluster.memory_bytes)}",
        ),
        ("sent a step", readable_bytes(sum(first.sent.values())), "by a rank"),
    ]
    for place, n in first.away.items():
        room = readable_bytes(searched.cluster.room(place, first.plan.world_size))
        boxes.append((f"on {place}", readable_bytes(n), f"of {room} a rank"))
    if plain.plan != first.plan:
        boxes.append((f"faster than {words(plain.plan)}", f"{plain.seconds / first.seconds:.2f} times", ""))
    cells = (
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(note)}</small></dd></div>"
        for name, value, note in boxes
    )
    return f'<dl class="figures">{"".join(cells)}</dl>\n'


def _best(searched: Found) -> str:
    head = ("", "plan", "rows", "step", "±", "samples/s", "MFU", "memory", "sent")
    rows = [
        (
            number,
            words(x.plan),
            str(x.rows),
            _seconds(x.seconds),
            f"{x.error:.0%}",
            f"{searched.batch / x.seconds:,.4g}",
            f"{searched.mfu(x):.1%}",
            f"{readable_bytes(x.bytes)}{'' if x.fits else ' (too much)'}"
            + "".join(f"\n+ {readable_bytes(n)} on {place}" for place, n in x.away.items()),
            "\n".join(f"{axis} {readable_bytes(n)}" for axis, n in x.sent.items() if n),
        )
        for number, x in _rows(searched)
    ]
    return _table("table of the best plans", head, rows, 2)


def _stack(parts: Mapping[str, float], colours: Mapping[str, int], most: float, text: str) -> str:
    spans = (
        f'<span class="back c{colours.get(key, 4)}" style="width: {n / most * 100:.3f}%"></span>'
        for key, n in parts.items()
        if n > 0
    )
    return f'<div class="stack" role="img" aria-label="{_text(text)}">{"".join(spans)}</div>'


def _keys(names: Iterable[str], colours: Mapping[str, int]) -> str:
    items = (f'<li class="c{colours.get(name, 4)}"><i></i>{_text(name)}</li>' for name in names)
    return f'<ul class="keys">{"".join(items)}</ul>'


def _bars(
    label: str, rows: Sequence[tuple[str, str, Mapping[str, float]]], colours: Mapping[str, int], say: object
) -> str:
    """Stacked bars: of each its number, its name, and its parts."""
    assert callable(say)
    most = max(sum(parts.values()) for _, _, parts in rows) or 1.0
    body = []
    for number, name, parts in rows:
        spoken = ", ".join(f"{key} {say(n)}" for key, n in parts.items())
        body.append(
            f'<tr><th scope="row">{_text(number)}</th><td>{_text(name)}</td>'
            f'<td class="bar">{_stack(parts, colours, most, spoken)}</td>'
            f'<td class="n">{_text(say(sum(parts.values())))}</td></tr>'
        )
    names = dict.fromkeys(key for _, _, parts in rows for key in parts)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(label)}">'
        f'<table class="full"><tbody>{"".join(body)}'
        f"</tbody></table></div>{_keys(names, colours)}"
    )


def _stacks(rows: Sequence[tuple[str, Prediction]], key: str, colours: Mapping[str, int], say: object) -> str:
    return _bars(key, [(n, words(x.plan), getattr(x, key)) for n, x in rows], colours, say)


def _ranks(first: Prediction) -> str:
    rows = [("", f"pipe {i}", kinds) for i, kinds in enumerate(first.by_rank)]
    return _bars("memory of each rank along the pipe axis", rows, _KINDS, readable_bytes)


def _dry(checked: Sequence[Checked]) -> str:
    rows = [
        (
            words(x.prediction.plan),
            readable_bytes(x.prediction.bytes),
            readable_bytes(x.bytes) + ("" if x.fits else ": left out, too much"),
        )
        for x in checked
    ]
    note = (
        '<p class="note">The engine\'s own step without data, as a rank of the first and the last stage.</p>'
    )
    return note + _table("predicted and dry memory", ("plan", "predicted", "dry"), rows, 1)


# ---- pictures


_WIDTH, _HEIGHT, _LEFT, _FLOOR = 1060, 360, 62, 34


def _ticks(low: float, high: float) -> Iterator[float]:
    """Round numbers between two."""
    steps = (1, 2, 5) if high / low > 8 else (1, 1.5, 2, 3, 4, 5, 6, 8)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (n * 10.0**power for n in steps if low <= n * 10.0**power <= high)


def front(searched: Found) -> list[Prediction]:
    """Those that nothing beats in both time and memory, fastest first."""
    least, kept = math.inf, []
    for x in sorted(searched.best, key=lambda x: (x.seconds, x.bytes)):
        if x.bytes < least:
            least = x.bytes
            kept.append(x)
    return kept


def _pareto(searched: Found) -> str:
    step = math.ceil(len(searched.best) / DOTS)
    edge = front(searched)
    dots = list(searched.best[::step])
    everyone = [*dots, *edge]
    low, high = (f(x.bytes for x in everyone) for f in (min, max))
    fast, slow = (f(x.seconds for x in everyone) for f in (min, max))
    low, high, fast, slow = low / 1.1, high * 1.1, fast / 1.1, slow * 1.1

    def x_of(n: float) -> float:
        return _LEFT + math.log(n / low) / math.log(high / low) * (_WIDTH - _LEFT - 12)

    def y_of(t: float) -> float:
        return 8 + math.log(slow / t) / math.log(slow / fast) * (_HEIGHT - _FLOOR - 8)

    marks = []
    for t in _ticks(fast, slow):
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y_of(t):.1f}" y2="{y_of(t):.1f}"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{y_of(t) + 4:.1f}" text-anchor="end">{_seconds(t)}</text>')
    for n in _ticks(low, high):
        marks.append(
            f'<text x="{x_of(n):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{readable_bytes(n)}</text>'
        )
    marks += [
        f'<circle class="dot" cx="{x_of(x.bytes):.1f}" cy="{y_of(x.seconds):.1f}" r="2.2"/>' for x in dots
    ]
    path = " ".join(f"{x_of(x.bytes):.1f},{y_of(x.seconds):.1f}" for x in edge)
    marks.append(f'<polyline class="front" points="{path}"/>')
    for x in edge:
        face = "chosen" if x is edge[0] else "c0 fill"
        hint = f"{words(x.plan)}: {_seconds(x.seconds)}, {readable_bytes(x.bytes)}"
        marks.append(
            f'<circle class="{face}" cx="{x_of(x.bytes):.1f}" cy="{y_of(x.seconds):.1f}" r="4">'
            f"<title>{_text(hint)}</title></circle>"
        )
    fastest = _seconds(edge[0].seconds)
    label = f"{len(edge)} plans that nothing beats in both time and memory; the fastest takes {fastest}"
    rows = [(words(x.plan), str(x.rows), _seconds(x.seconds), readable_bytes(x.bytes)) for x in edge]
    part = f" One of {step} is drawn." if step > 1 else ""
    return (
        f'<p class="note">Each dot is a plan that fits: memory of its fullest rank to the right, a step\'s '
        f"time upwards.{part} The line joins those that nothing beats in both.</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" aria-label="{_text(label)}">'
        f"{''.join(marks)}</svg>"
        + _table("plans that nothing beats", ("plan", "rows", "step", "memory"), rows, 1)
    )


def _pipeline(first: Prediction, timeline: Timeline) -> str:
    line = 27
    ranks, schedule = len(timeline.spans), timeline.schedule
    height, end = ranks * line + 24, timeline.step_time or 1.0
    scale = (_WIDTH - _LEFT) / end
    marks: list[str] = []
    kinds: dict[str, None] = {}
    for rank, row in enumerate(timeline.spans):
        top = rank * line + 2
        marks.append(f'<text x="0" y="{top + 15}">rank {rank}</text>')
        marks.append(
            f'<rect class="idle" x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{line - 5}"/>'
        )
        for (kind, stage, micro_batch), start, stop in row:
            x, wide = _LEFT + start * scale, max(0.7, (stop - start) * scale - 0.8)
            kinds[str(kind)] = None
            second = " second" if stage >= ranks else ""
            hint = (
                f"{_ACTIONS[str(kind)]}, stage {stage}, micro-batch {micro_batch}: {_seconds(stop - start)}"
            )
            marks.append(
                f'<rect class="span-{kind}{second}" x="{x:.2f}" y="{top}" width="{wide:.2f}" '
                f'height="{line - 5}">'
                f"<title>{_text(hint)}</title></rect>"
            )
            if wide > 15:
                marks.append(f'<text class="on" x="{x + wide / 2:.1f}" y="{top + 15}">{micro_batch}</text>')
    marks.append(f'<text x="{_LEFT}" y="{height - 6}">0</text>')
    marks.append(f'<text x="{_WIDTH}" y="{height - 6}" text-anchor="end">{_seconds(end)}</text>')
    whole = first.plan.accumulate
    part = (
        f" {schedule.micro_batches} of its {whole} micro-batches." if schedule.micro_batches < whole else ""
    )
    keys = "".join(
        f'<li><svg width="17" height="11" aria-hidden="true"><rect class="span-{kind}" width="11" '
        f'height="11"/></svg>{_ACTIONS[kind]}</li>'
        for kind in kinds
    )
    label = f"timeline of {ranks} ranks; {timeline.bubble_fraction:.0%} of their time is idle"
    return (
        f'<p class="note">{_text(str(schedule).partition(chr(10))[0])}.{part} Messages between stages travel '
        f"beside the computation.</p>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" role="img" aria-label="{_text(label)}">'
        f'{"".join(marks)}</svg><ul class="keys">{keys}</ul>'
    )


def _step(first: Prediction, step: Step) -> str:
    """The lanes of the ranks along the pipe axis, and of one block."""
    whole = first.plan.accumulate
    part = f" {step.micro_batches} of its {whole} micro-batches." if step.micro_batches < whole else ""
    n = len(step.ranks)
    shown = range(n) if n <= SHOWN else (0, n - 1)
    note = f"When the device computes, its host issues operations, and each axis is in use.{part}"
    body = [
        f'<p class="note">{note}</p>',
        _lanes(
            {f"rank {i} " if n > 1 else "": step.ranks[i] for i in shown},
            step.seconds,
        ),
    ]
    if step.block and len(step.block) <= DOTS:
        end = max(x.end for x in step.block)
        body.append('<p class="note">Forward and backward of one block, operation by operation.</p>')
        body.append(_lanes({"": step.block}, end))
    return "".join(body)


def _lanes(ranks: Mapping[str, Sequence[Happening]], seconds: float) -> str:
    line, left = 19, 118
    marks: list[str] = []
    scale, top = (_WIDTH - left) / (seconds or 1.0), 2
    for name, row in ranks.items():
        for lane in lanes(row):
            marks.append(f'<text x="0" y="{top + 11}">{_text(name + lane)}</text>')
            marks.append(
                f'<rect class="idle" x="{left}" y="{top}" width="{_WIDTH - left}" height="{line - 5}"/>'
            )
            for x in row:
                if x.lane == lane:
                    marks.append(
                        f'<rect class="c{_colour(x)} fill" x="{left + x.start * scale:.2f}" y="{top}" '
                        f'width="{max(0.5, (x.end - x.start) * scale):.2f}" height="{line - 5}">'
                        f"<title>{_text(x.name)}: {_seconds(x.end - x.start)}</title></rect>"
                    )
            top += line
    marks.append(f'<text x="{left}" y="{top + 12}">0</text>')
    marks.append(f'<text x="{_WIDTH}" y="{top + 12}" text-anchor="end">{_seconds(seconds)}</text>')
    label = f"timeline of {', '.join(dict.fromkeys(x.lane for row in ranks.values() for x in row))}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {top + 16}" width="100%" role="img" aria-label="{_text(label)}">'
        f"{''.join(marks)}</svg>"
    )


def _colour(x: Happening) -> int:
    return _TERMS["update"] if x.name == "update" else _TERMS.get(x.lane, 4)
