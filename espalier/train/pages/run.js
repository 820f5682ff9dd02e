"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const given = JSON.parse(document.getElementById("data").textContent);
  let runs = given.runs, live = given.live, lost = false;
  const view = { x: "step", scale: "linear", at: null, holds: "box" };

  // ---- building

  function add(node, children) {
    for (const child of [children].flat(9)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  function h(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    return add(node, children);
  }
  function s(tag, attributes, ...children) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    return add(node, children);
  }

  // ---- numbers as text

  const minus = text => text.replace("-", "−");
  function bytes(n) {
    for (const unit of ["B", "KB", "MB", "GB"]) {
      if (Math.abs(n) < 1000) return `${unit === "B" ? n.toFixed(0) : +n.toPrecision(3)} ${unit}`;
      n /= 1000;
    }
    return `${+n.toPrecision(3)} TB`;
  }
  function short(n) {
    const size = Math.abs(n);
    if (!size) return "0";
    if (size >= 1e15) return minus(n.toExponential(1));
    if (size >= 1e12) return `${+(n / 1e12).toPrecision(3)}T`;
    if (size >= 1e9) return `${+(n / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${+(n / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${+(n / 1e3).toPrecision(3)}k`;
    if (size < 1e-3) return minus(n.toExponential(1));
    return minus(String(+n.toPrecision(4)));
  }
  const prefixed = n => short(n).replace(/([kMGT])?$/, (_, unit) => ` ${unit || ""}`);
  const fixed = digits => n => minus(n.toFixed(digits));
  const grouped = n => Math.round(n).toLocaleString("en");
  function clock(seconds) {
    const all = Math.round(seconds), two = n => String(n).padStart(2, "0");
    const hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
    return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
  }
  function shortened(text, most) {  // names of runs differ at their ends, as often as not
    const head = Math.ceil((most - 1) / 2);
    return text.length > most ? `${text.slice(0, head)}…${text.slice(head + 1 - most)}` : text;
  }
  const count = (n, one, many) => `${grouped(n)} ${n === 1 ? one : many || one + "s"}`;
  const when = text => text ? text.replace("T", " ").replace("+00:00", " UTC") : "";

  // ---- what a run says

  const last = run => run.records[run.records.length - 1];
  const lastOf = (run, has) => run.records.findLast(has);
  const lasting = run => view.x === "step" ? r => r.step : r => r.seconds / 60;
  function secondsAt(run, step) {
    const after = run.records.find(r => r.step >= step) || last(run);
    return after ? after.seconds : 0;
  }
  function placed(run, event) {
    return view.x === "step" ? event.step : secondsAt(run, event.step) / 60;
  }
  function utilization(run, record) {
    if (!run.flops || !run.peak || !run.tokens || !record.tokens_per_second) return null;
    return record.tokens_per_second / run.tokens * run.flops / run.peak.rate;
  }
  function axesOf(run) {
    const axes = Object.entries(run.plan ? run.plan.axes : {}).filter(([, size]) => size > 1);
    return axes.length ? axes.map(([name, size]) => `${name} ${size}`).join(" × ") : "one rank";
  }

  // ---- charts

  function ticks(low, high, most, least = 0) {
    const step0 = Math.max((high - low) / most, least), power = 10 ** Math.floor(Math.log10(step0));
    const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(x => x >= step0 * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
    return found;
  }
  function logTicks(low, high) {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const m of [1, 2, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) found.push(+(m * 10 ** p).toPrecision(3));
    return found;
  }

  const charts = [];
  class Chart {
    // what: () => ({series: [{name, c, points: [[x, y]], dots, thin, label}], rulers: [{y, label}], marks: [{x, text}]})
    constructor(title, what, { format = short, tick = format, height = 190, log = false, fromZero = false, none = "" } = {}) {
      Object.assign(this, { title, what, format, tick, height, log, fromZero, none });
      this.said = h("p", { class: "said" });
      this.node = h("div", { class: "chart", tabindex: 0, role: "slider", "aria-label": title,
        "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "no records yet" });
      this.node.addEventListener("pointermove", event => this.pointed(event));
      this.node.addEventListener("pointerleave", () => point(null));
      this.node.addEventListener("keydown", event => this.pressed(event));
      charts.push(this);
    }
    section(id) {
      const heading = h("h2", { id: `${id}-title` }, this.title);
      return h("section", { id, "aria-labelledby": `${id}-title` }, h("div", { class: "top" }, heading, this.said), this.node);
    }
    xs() { return [...new Set(this.data.series.flatMap(x => x.points.map(p => p[0])))].sort((a, b) => a - b); }
    draw() {
      const data = this.data = this.what();
      const width = Math.max(280, this.node.clientWidth || 700), height = this.height;
      const all = data.series.flatMap(x => x.points);
      this.node.replaceChildren();
      if (!all.length) { this.said.textContent = this.none && runs.some(x => x.records.length) ? this.none : "nothing measured yet"; return; }
      const logs = this.log && view.scale === "log" && all.every(p => p[1] > 0);
      const ys = [...all.map(p => p[1]), ...data.rulers.map(r => r.y)];
      let low = Math.min(...ys), high = Math.max(...ys);
      if (this.fromZero) low = 0;
      if (low === high) { const pad = Math.abs(high) * 0.5 || 1; low = this.fromZero ? 0 : low - pad; high += pad; }
      const f = logs ? Math.log : y => y, pad = (f(high) - f(low)) * 0.06;
      const bottom = this.fromZero ? 0 : f(low) - pad, top = f(high) + pad;
      const labels = data.series.filter(x => x.label !== false && x.points.length);
      const most = Math.max(9, Math.floor(width * 0.25 / 7)), label = x => shortened(x.name, most);
      const room = labels.length ? Math.max(...labels.map(x => label(x).length)) * 7 + 14 : 12;
      const yTicks = logs ? logTicks(low, high) : ticks(this.fromZero ? 0 : low, high, height > 220 ? 6 : 4);
      const left = 14 + 7 * Math.max(1, ...yTicks.map(t => this.tick(t).length)), right = width - room;
      const x0 = Math.min(...all.map(p => p[0])), x1 = Math.max(...all.map(p => p[0]));
      const begin = view.x === "step" ? x0 : 0, end = x1 === begin ? begin + 1 : x1;
      const X = x => left + (x - begin) / (end - begin) * (right - left);
      const Y = y => 8 + (top - f(y)) / (top - bottom || 1) * (height - 34);
      Object.assign(this, { X, left, right, begin, end, width });
      const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      for (const t of yTicks) add(svg, [
        s("line", { class: "grid", x1: left, x2: right, y1: Y(t), y2: Y(t) }),
        s("text", { x: left - 8, y: Y(t) + 4, "text-anchor": "end" }, this.tick(t))]);
      const floor = height - 26;
      add(svg, s("line", { class: "axis", x1: left, x2: right, y1: floor, y2: floor }));
      const xTicks = ticks(begin, end, Math.max(2, Math.min(8, (right - left) / 90)), view.x === "step" ? 1 : 0);
      for (const t of xTicks) add(svg, s("text", { x: X(t), y: height - 8, "text-anchor": "middle" }, short(t)));
      const unit = view.x === "step" ? "step" : "min";
      if (X(xTicks[xTicks.length - 1]) < right - 46 || room > 56)
        add(svg, s("text", { x: right + (room > 56 ? 26 : 0), y: height - 8, "text-anchor": room > 56 ? "start" : "end" }, unit));
      for (const mark of data.marks) add(svg, [
        s("line", { class: "mark", x1: X(mark.x), x2: X(mark.x), y1: 8, y2: floor }, s("title", {}, mark.text)),
        s("path", { class: "c1 fill", d: `M${X(mark.x) - 4} ${floor + 1}l8 0l-4 -7z` })]);
      for (const ruler of data.rulers) add(svg, [
        s("line", { class: "ruler", x1: left, x2: right, y1: Y(ruler.y), y2: Y(ruler.y) }),
        s("text", { class: "halo", x: right - 4, y: Y(ruler.y) - 6, "text-anchor": "end" }, ruler.label)]);
      for (const one of data.series) {
        const path = one.points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
        const g = s("g", { class: `c${one.c}`, "data-series": one.name });
        if (one.points.length) add(g, s("path", { class: `line stroke${one.thin ? " thin" : ""}`, d: path,
          "stroke-dasharray": one.dash || "none" }));
        if (one.dots || one.points.length === 1)
          for (const p of one.points) add(g, s("circle", { class: "fill", cx: X(p[0]), cy: Y(p[1]), r: 3.2 }));
        add(svg, g);
      }
      this.names(svg, labels, right, Y, label);
      this.cursor = s("g", { class: "at" });
      add(svg, this.cursor);
      add(this.node, svg);
      const xs = this.xs();
      this.node.setAttribute("aria-valuemax", Math.max(0, xs.length - 1));
      this.point(view.at);
    }
    names(svg, labels, right, Y, label) {  // at the lines' ends, pushed apart where they meet
      const ends = labels.map(x => ({ x, y: Y(x.points[x.points.length - 1][1]) })).sort((a, b) => a.y - b.y);
      for (let i = 1; i < ends.length; i++) ends[i].y = Math.max(ends[i].y, ends[i - 1].y + 15);
      const over = ends.length ? ends[ends.length - 1].y - (this.height - 30) : 0;
      for (const end of ends) if (over > 0) end.y -= over;
      for (const { x, y } of ends)
        add(svg, s("text", { class: `label c${x.c}`, x: right + 9, y: y + 4 }, s("title", {}, x.name), label(x)));
    }
    point(at) {
      if (!this.data || !this.cursor) return;
      this.cursor.replaceChildren();
      const xs = this.xs();
      const x = at === null ? xs[xs.length - 1] : xs.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
      const told = [];
      for (const one of this.data.series) {
        const near = one.points.findLast(p => p[0] <= x + 1e-9);
        if (near) told.push(`${this.data.series.length > 1 ? one.name + " " : ""}${this.format(near[1])}${one.dots && near[0] !== x ? " (at " + short(near[0]) + ")" : ""}`);
      }
      const text = `${view.x === "step" ? "step " + grouped(x) : "minute " + short(x)}: ${told.slice(0, 6).join(", ")}`;
      this.said.textContent = text;
      this.node.setAttribute("aria-valuenow", Math.max(0, xs.indexOf(x)));
      this.node.setAttribute("aria-valuetext", text);
      if (at !== null) add(this.cursor, s("line", { class: "cursor", x1: this.X(x), x2: this.X(x), y1: 8, y2: this.height - 26 }));
    }
    pointed(event) {
      if (!this.X) return;
      const box = this.node.getBoundingClientRect();
      const share = ((event.clientX - box.left) * this.width / box.width - this.left) / (this.right - this.left);
      point(this.begin + Math.min(1, Math.max(0, share)) * (this.end - this.begin));
    }
    pressed(event) {
      if (!this.data) return;
      const xs = this.xs(), now = +this.node.getAttribute("aria-valuenow");
      const moves = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
        PageDown: now - 10, PageUp: now + 10, Home: 0, End: xs.length - 1 };
      if (event.key === "Escape") return point(null);
      if (!(event.key in moves)) return;
      event.preventDefault();
      point(xs[Math.min(xs.length - 1, Math.max(0, moves[event.key]))]);
    }
  }
  function point(at) { view.at = at; for (const chart of charts) chart.point(at); }

  function curves(value, { dots = false } = {}) {
    return runs.map((run, i) => ({ name: runs.length > 1 ? run.name : "", c: i, dots, label: runs.length > 1,
      points: run.records.filter(r => value(r, run) !== null && value(r, run) !== undefined).map(r => [lasting(run)(r), value(r, run)]) }));
  }
  function marks() {
    return runs.flatMap(run => run.events.filter(e => ["spike", "rollback", "restart", "resume"].includes(e.kind))
      .map(e => ({ x: placed(run, e), text: `${e.kind}, step ${e.step}: ${e.text}` })));
  }
  const only = series => ({ series, rulers: [], marks: [] });

  const several = runs.length > 1, counted = runs.every(run => run.unit === "images") ? "Images" : "Tokens";
  const lossChart = new Chart("Loss", () => ({
    series: runs.flatMap((run, i) => {
      const at = lasting(run), mean = r => [at(r), r.val_loss], name = several ? run.name : "training";
      return [
        { name, c: several ? i : 0, points: run.records.filter(r => r.loss !== null).map(r => [at(r), r.loss]) },
        { name: several ? `${run.name}, validation` : "validation", c: several ? i : 1, dots: true, dash: several ? "4 4" : null,
          label: !several, points: run.records.filter(r => r.val_loss !== null && r.val_loss !== undefined).map(mean) }];
    }),
    rulers: runs.slice(0, 1).filter(run => run.entropy).map(run => ({ y: run.entropy, label: `unigram entropy ${fixed(2)(run.entropy)}` })),
    marks: marks() }), { height: 330, log: true, format: fixed(3), tick: short });
  const small = [
    ["norm", new Chart("Gradient norm", () => ({ ...only(curves(r => r.grad_norm)), marks: marks() }), { fromZero: true })],
    ["rate", new Chart("Learning rate", () => only(curves(r => r.lr)), { fromZero: true })],
    ["speed", new Chart(`${counted} a second`, () => only(curves(r => r.tokens_per_second || null)), { fromZero: true })],
    ["mfu", new Chart("Model FLOPs utilization", () => only(curves((r, run) => utilization(run, r))), { fromZero: true, format: n => `${+(n * 100).toPrecision(3)}%` })],
    ["peak", new Chart("Peak memory", () => only(peaks()), { format: bytes, fromZero: true })],
    ["sent", new Chart("Sent a step, by axis", () => only(sent()), { format: bytes, fromZero: true, none: "nothing is sent" })],
  ];
  function peaks() {
    if (several) return curves(r => Math.max(...r.memory));
    const run = runs[0], ranks = Math.max(0, ...run.records.map(r => r.memory.length));
    return Array.from({ length: Math.min(ranks, 8) }, (_, rank) => ({ name: `rank ${rank}`, c: rank % 6, thin: true, label: ranks < 5,
      points: run.records.filter(r => r.memory.length > rank).map(r => [lasting(run)(r), r.memory[rank]]) }));
  }
  function sent() {
    return runs.flatMap((run, i) => {
      const axes = [...new Set(run.records.flatMap(r => Object.keys(r.sent || {})))];
      return axes.map((axis, j) => ({ name: several ? `${run.name}, ${axis}` : axis, c: several ? i : j % 6, label: axes.length < 6,
        points: run.records.filter(r => axis in (r.sent || {})).map(r => [lasting(run)(r), r.sent[axis]]) }));
    });
  }

  // ---- head

  function choice(name, key, options) {
    return h("span", { class: "choice", role: "group", "aria-label": name }, h("span", {}, name),
      Object.entries(options).map(([value, text]) => h("button", { type: "button", "aria-pressed": String(view[key] === value),
        onclick: event => {
          view[key] = value;
          view.at = null;
          for (const other of event.target.parentNode.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === event.target));
          for (const chart of charts) chart.draw();
        } }, text)));
  }
  function theme() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return h("button", { type: "button", onclick: () => {
      const root = document.documentElement, now = root.dataset.theme || (dark ? "dark" : "light");
      root.dataset.theme = now === "dark" ? "light" : "dark";
    } }, "light / dark");
  }
  const tools = h("div", { class: "tools" }, choice("along", "x", { step: "steps", time: "time" }),
    choice("loss", "scale", { linear: "linear", log: "log" }), theme());

  function statusOf(run) {
    const now = last(run);
    const words = { running: live && !lost ? "training" : "training when this was written", finished: "finished", failed: "failed", left: "stopped" };
    const text = lost ? "the server is gone; what follows is the last it said" : words[run.status] || "of an earlier version";
    const step = Math.max(now ? now.step : 0, ...run.events.filter(e => e.kind === "failed").slice(-1).map(e => e.step));
    return h("p", { class: `status ${run.status || "left"}`, role: "status" }, text + (now && run.steps ? `, step ${grouped(run.status === "failed" ? step : now.step)} of ${grouped(run.steps)}` : ""));
  }
  function shortly(text) { // without what was written to standard error, which stands further down
    return text.split("\n").filter(line => !/^(    |The last it wrote|It wrote nothing)/.test(line)).join("\n");
  }
  function head() {
    const node = document.getElementById("head"), run = runs[0], now = last(run);
    if (several) {
      node.replaceChildren(h("p", { class: "brand" }, "espalier, two runs"), h("h1", {}, runs.map(r => r.name).join(" and ")), tools);
      return;
    }
    const folder = (run.folder || "").replace(/[/\\]+$/, "").split(/[/\\]/).pop();
    const what = [run.model, run.parameters && `${grouped(run.parameters)} parameters`, run.optimizer,
      run.plan && (run.plan.ranks > 1 ? `${axesOf(run)} (${count(run.plan.ranks, "rank")})` : axesOf(run)), folder !== run.name && folder, run.began && `began ${when(run.began)}`].filter(Boolean);
    const share = now && run.steps ? Math.min(100, now.step / run.steps * 100) : 100;
    const end = run.status === "failed" ? run.events.filter(e => e.kind === "failed").pop() : null;
    node.replaceChildren(h("p", { class: "brand" }, "espalier"), h("div", { class: "top" }, h("h1", {}, run.name), statusOf(run)),
      h("p", { class: "what" }, what.join(" · ")), ...(end ? [h("p", { class: "why" }, shortly(end.text))] : []),
      h("div", { class: "progress", role: "progressbar", "aria-label": "steps done", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share) },
        h("div", { style: `width: ${share}%` })), tools);
    if (live && now) document.title = `${Math.round(share)}% · ${run.name} · espalier`;
  }
  function figure(name, value, more) {
    return h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));
  }
  function figures(run) {
    const now = last(run), found = [];
    if (!now) return h("p", { class: "note" }, "No step has been measured yet.");
    const val = lastOf(run, r => r.val_loss !== null && r.val_loss !== undefined), lost = lastOf(run, r => r.loss !== null);
    if (lost) found.push(figure("training loss", fixed(3)(lost.loss), "nats"));
    if (val) found.push(figure("validation", fixed(3)(val.val_loss), run.entropy ? `${fixed(2)(Math.abs(run.entropy - val.val_loss))} ${run.entropy > val.val_loss ? "below" : "above"} unigram` : `step ${grouped(val.step)}`));
    const rates = run.records.slice(-8).map(r => r.tokens_per_second).sort((a, b) => a - b), rate = rates[rates.length >> 1];
    if (rate) found.push(figure(`${run.unit || "tokens"} a second`, short(rate), "of all ranks"));
    const used = utilization(run, { tokens_per_second: rate });
    if (used !== null) found.push(figure("MFU", `${(used * 100).toFixed(used < 0.1 ? 1 : 0)}%`, `${prefixed(rate / run.tokens * run.flops)}FLOP/s`));
    found.push(figure("peak memory", bytes(Math.max(...now.memory)), now.memory.length > 1 ? "fullest rank" : null));
    found.push(figure("trained for", clock(now.seconds), run.steps && now.step < run.steps && run.status === "running" ? `${clock(now.seconds / now.step * (run.steps - now.step))} to go` : count(now.step, "step")));
    return h("dl", { class: "figures" }, found);
  }

  // ---- who holds what

  function groupsOf(run) {
    const first = run.holds.find(Boolean) || [];
    const rows = first.map((part, i) => ({ ...part, ranks: run.holds.map(of => of && of.find(p => p.name === part.name)) }));
    const look = row => JSON.stringify([row.shape, row.bytes, row.parameter.replace(row.name, ""), row.ranks.map(r => r && [r.box, r.states])]);
    const merged = [];
    for (const row of rows) {
      const before = merged[merged.length - 1];
      if (before && before.look === look(row)) { before.to = row.name; before.n++; before.bytes += row.bytes; }
      else merged.push({ ...row, look: look(row), n: 1, to: row.name });
    }
    return merged;
  }
  function nameOf(group) {
    if (group.n === 1) return group.name;
    const tail = group.to.split(".").pop();
    return /^\d+$/.test(tail) ? `${group.name} – ${tail}` : `${group.name} … ${group.to}`;
  }
  function lattice(run) {
    if (!run.holds || !run.holds.some(Boolean)) return null;
    const key = view.holds, rows = groupsOf(run), ranks = run.holds.length, axes = run.mesh.names.filter((_, i) => run.mesh.shape[i] > 1);
    const cell = Math.max(46, Math.min(132, Math.floor(460 / ranks))), line = 46, left = 190, topSpace = 30 + 16 * axes.length, W = left + ranks * cell + 170, H = topSpace + rows.length * line + 4;
    const svg = s("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, class: "lattice", role: "img", "aria-label": "Which part of each layer's largest parameter each rank holds" });
    run.ranks.forEach((rank, i) => {
      const x = left + i * cell + cell / 2;
      add(svg, [s("line", { class: "wire", x1: x, x2: x, y1: topSpace - 6, y2: H }),
        s("text", { class: "rank", x, y: 14, "text-anchor": "middle" }, `rank ${i}`),
        axes.map((axis, j) => s("text", { class: "quiet", x, y: 31 + 16 * j, "text-anchor": "middle" }, String(rank.coordinate[axis])))]);
    });
    axes.forEach((axis, j) => add(svg, s("text", { class: "quiet", x: left - 14, y: 31 + 16 * j, "text-anchor": "end" }, axis)));
    rows.forEach((row, i) => {
      const y = topSpace + i * line + line / 2;
      add(svg, [s("line", { class: "wire", x1: left - 6, x2: left + ranks * cell, y1: y, y2: y }),
        s("text", { x: left - 14, y: y + 1, "text-anchor": "end" }, nameOf(row)),
        s("text", { class: "quiet", x: left - 14, y: y + 15, "text-anchor": "end" }, row.n > 1 ? `${row.n} alike` : ""),
        s("text", { x: left + ranks * cell + 14, y: y + 1 }, bytes(row.bytes)),
        s("text", { class: "quiet", x: left + ranks * cell + 14, y: y + 15 }, `${row.parameter.split(".").slice(-2, -1)[0] || row.parameter} ${row.shape.join(" × ")}`)]);
      row.ranks.forEach((of, r) => {
        const w = Math.min(84, cell - 14), t = row.shape.length > 1 ? 28 : 7, x = left + r * cell + (cell - w) / 2, box = of && (row.shape.length > 1 || !of[key] ? of[key] : [0, 1, of[key][0], of[key][1]]);
        add(svg, s("rect", { class: "whole", x, y: y - t / 2, width: w, height: t }));
        if (!box) return;
        const [a, b, c, d] = box;
        add(svg, s("rect", { class: `here${key === "states" ? " states" : ""}`, x: x + c * w, y: y - t / 2 + a * t, width: Math.max(1.5, (d - c) * w), height: Math.max(1.5, (b - a) * t) },
          s("title", {}, `rank ${r}: ${row.parameter}, ${(of[key][0] * 100).toFixed(0)} to ${(of[key][1] * 100).toFixed(0)}% of the first dim, ${(of[key][2] * 100).toFixed(0)} to ${(of[key][3] * 100).toFixed(0)}% of the last`)));
      });
    });
    const which = h("div", { class: "tools" }, h("span", { class: "choice", role: "group", "aria-label": "what is shown" },
      [["box", "parameters"], ["states", "optimizer's states"]].map(([value, text]) => h("button", { type: "button", "aria-pressed": String(view.holds === value),
        onclick: () => { view.holds = value; refill("holds"); const again = document.querySelectorAll("#holds button"); again[value === "box" ? 0 : 1].focus(); } }, text))));
    const more = run.plan.ranks > ranks ? ` The first ${ranks} of ${grouped(run.plan.ranks)} ranks.` : "";
    return [h("div", { class: "top" }, h("h2", { id: "holds-title" }, "Which rank holds what"), which),
      h("p", { class: "note" }, `A cell is the largest parameter of a layer: a matrix with its rows downwards, or a vector. Filled is the part that the rank keeps between uses.${more}`),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "layers by rank" }, svg)];
  }

  // ---- memory, and what is sent

  const KINDS = ["parameters", "gradients", "states", "masters", "gathered", "buffers"];
  function memory(run) {
    const record = lastOf(run, r => r.held && Object.keys(r.held).length);
    if (!record) return null;
    const kinds = Object.keys(record.held).filter(kind => Math.max(...record.held[kind]) > 0);
    const ranks = record.memory.map((_, i) => kinds.map(kind => record.held[kind][i] || 0));
    const total = of => of.reduce((a, b) => a + b, 0), most = Math.max(...ranks.map(total)) || 1, shown = ranks.slice(0, 32);
    const colour = kind => `c${Math.max(0, KINDS.indexOf(kind))}`;
    return [h("div", { class: "top" }, h("h2", { id: "memory-title" }, "Memory by kind"), h("p", { class: "said" }, `in the backward pass of step ${grouped(record.step)}, when gradients are fullest`)),
      h("table", { class: "full" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "rank"), h("th", { scope: "col" }, "held by kind"), h("th", { class: "n", scope: "col" }, "held"), h("th", { class: "n", scope: "col" }, "peak, with all else"))),
        h("tbody", {}, shown.map((of, i) => h("tr", {}, h("th", { scope: "row" }, String(i)),
          h("td", { class: "bar" }, h("div", { class: "stack", role: "img", "aria-label": kinds.map((k, j) => `${k} ${bytes(of[j])}`).join(", ") },
            of.map((n, j) => n ? h("span", { class: `back ${colour(kinds[j])}`, style: `width: ${n / most * 100}%`, title: `${kinds[j]}: ${bytes(n)}` }) : null))),
          h("td", { class: "n" }, bytes(total(of))), h("td", { class: "n" }, bytes(record.memory[i])))))),
      h("ul", { class: "keys" }, kinds.map((kind, j) => h("li", { class: colour(kind) }, h("i", {}), `${kind}, ${bytes(Math.max(...ranks.map(r => r[j])))}`)))];
  }
  function traffic(run) {
    const record = lastOf(run, r => r.sent && Object.keys(r.sent).length);
    if (!record) return null;
    const rows = Object.entries(record.sent).map(([axis, n], i) => [axis, n, i % 6]).sort((a, b) => b[1] - a[1]), most = rows[0][1] || 1;
    return [h("div", { class: "top" }, h("h2", { id: "traffic-title" }, "Sent in a step"), h("p", { class: "said" }, `by rank 0, step ${grouped(record.step)}`)),
      h("table", { class: "full" }, h("thead", {}, h("tr", {}, ["axis", "", "bytes"].map((t, i) => t ? h("th", { scope: "col", class: i === 2 ? "n" : "" }, t) : h("td", {})))),
        h("tbody", {}, rows.map(([axis, n, colour]) => h("tr", {}, h("th", { scope: "row" }, axis),
          h("td", { class: "bar" }, h("div", { class: "stack" }, h("span", { class: `back c${colour}`, style: `width: ${n / most * 100}%` }))), h("td", { class: "n" }, bytes(n))))))];
  }

  // ---- a pipeline's timeline

  function pipeline(run) {
    if (!run.timeline) return null;
    const both = [["measured", run.timeline.measured], ["by its schedule, with the same times", run.timeline.predicted]];
    const end = Math.max(...both.flatMap(([, rows]) => rows.flat().map(x => x[4]))) || 1;
    const left = 62, W = 1060, line = 27, ranks = run.timeline.measured.length;
    const names = { F: "forward", B: "backward", I: "backward, of inputs", W: "of weights" };
    const stages = Math.max(...run.timeline.measured.flat().map(x => x[1])) + 1;
    const picture = ([title, rows]) => {
      const svg = s("svg", { viewBox: `0 0 ${W} ${rows.length * line + 24}`, width: "100%", role: "img", "aria-label": `timeline ${title}` });
      rows.forEach((row, r) => {
        add(svg, [s("text", { x: 0, y: r * line + 17 }, `rank ${r}`), s("rect", { class: "idle", x: left, y: r * line + 2, width: W - left, height: line - 5 })]);
        for (const [kind, stage, micro, a, b] of row) {
          const x = left + a / end * (W - left), w = Math.max(0.7, (b - a) / end * (W - left) - 0.8);
          add(svg, s("rect", { class: `span-${kind}${stages > ranks && stage >= ranks ? " second" : ""}`, x, y: r * line + 2, width: w, height: line - 5 },
            s("title", {}, `${names[kind]}, stage ${stage}, micro-batch ${micro}: ${((b - a) * 1000).toFixed(2)} ms`)));
          if (w > 15) add(svg, s("text", { class: "on", x: x + w / 2, y: r * line + 17 }, String(micro)));
        }
      });
      for (const t of ticks(0, end * 1000, 8)) add(svg, s("text", { x: left + t / 1000 / end * (W - left), y: rows.length * line + 16, "text-anchor": "middle" }, `${short(t)}`));
      add(svg, s("text", { x: 0, y: rows.length * line + 16 }, "ms"));
      return [h("h3", {}, title), h("div", {}, svg)];
    };
    const kinds = [...new Set(run.timeline.measured.flat().map(x => x[0]))];
    return [h("div", { class: "top" }, h("h2", { id: "pipeline-title" }, "The pipeline's step"), h("p", { class: "said" }, `${(run.timeline.bubble * 100).toFixed(0)}% of the ranks' time is idle`)),
      h("p", { class: "note" }, run.timeline.schedule), both.map(picture),
      h("ul", { class: "keys" }, kinds.map(kind => h("li", {}, s("svg", { width: 17, height: 11, "aria-hidden": "true" }, s("rect", { class: `span-${kind}`, width: 11, height: 11 })), names[kind])))];
  }

  // ---- words

  function events(run) {
    const told = run.events.filter(e => e.kind !== "sample");
    if (!told.length) return [h("h2", { id: "events-title" }, "What happened"), h("p", { class: "note" }, "No spike, no restart, no rollback.")];
    return [h("h2", { id: "events-title" }, "What happened"), h("ul", { class: "events" }, told.map(e => h("li", {},
      h("span", { class: `kind ${e.kind}` }, e.kind), h("span", { title: when(e.at) }, `step ${grouped(e.step)}`), h("span", { class: "said" }, e.text))))];
  }
  function samples(run) {
    const told = run.events.filter(e => e.kind === "sample");
    if (!told.length) return null;
    return [h("h2", { id: "samples-title" }, "What it writes"), told.slice(-6).map(e => [h("p", { class: "said" }, `after step ${grouped(e.step)}`), h("pre", {}, e.text)])];
  }
  function job(run) { return run.job ? [h("h2", { id: "job-title" }, "The job"), h("pre", {}, run.job)] : null; }
  function made(run) {
    if (!run.versions) return null;
    const rank = run.ranks && run.ranks[0], hosts = run.ranks ? [...new Set(run.ranks.map(r => r.host))] : [];
    const rows = { ...run.versions };
    if (rank) rows.device = rank.device;
    if (hosts.length) rows.hosts = hosts.slice(0, 8).join(", ");
    if (run.peak) rows["MFU is of"] = `${prefixed(run.peak.rate)}FLOP/s: ${run.peak.source}`;
    if (run.flops) rows["a step takes"] = `${prefixed(run.flops)}FLOP, forward and backward`;
    return [h("h2", { id: "made-title" }, "Made of"), h("table", {}, h("tbody", {}, Object.entries(rows).map(([name, text]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, text)))))];
  }
  function numbers() {
    const body = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "all records" });
    const node = h("details", { id: "numbers" }, h("summary", {}, "All numbers"), body);
    node.addEventListener("toggle", () => {
      if (!node.open) return body.replaceChildren();
      const head = ["run", "step", "loss", "validation", "gradient norm", "learning rate", `${counted.toLowerCase()}/s`, "peak memory"].slice(several ? 0 : 1);
      const text = (x, format) => x === null || x === undefined ? "" : format(x);
      body.replaceChildren(h("table", {}, h("thead", {}, h("tr", {}, head.map(x => h("th", { scope: "col", class: "n" }, x)))), h("tbody", {}, runs.flatMap(run => run.records.map(r => h("tr", {},
        several ? h("td", {}, run.name) : null,
        [grouped(r.step), text(r.loss, fixed(4)), text(r.val_loss, fixed(4)), text(r.grad_norm, fixed(3)), r.lr.toExponential(2), grouped(r.tokens_per_second), bytes(Math.max(...r.memory))].map(x => h("td", { class: "n" }, x))))))));
    });
    return node;
  }

  // ---- two runs beside each other

  function beside() {
    const value = (run, f) => { const now = last(run); return now ? f(run, now) : "–"; };
    const rows = {
      "status": run => run.status || "–", "plan": axesOf,
      "steps": run => value(run, (_, r) => grouped(r.step)),
      "training loss": run => value(run, (_, r) => r.loss === null ? "–" : fixed(4)(r.loss)),
      "validation loss": run => { const r = lastOf(run, x => x.val_loss !== null && x.val_loss !== undefined); return r ? fixed(4)(r.val_loss) : "–"; },
      [`${counted.toLowerCase()} a second, median`]: run => { const all = run.records.map(r => r.tokens_per_second).sort((a, b) => a - b); return all.length ? grouped(all[all.length >> 1]) : "–"; },
      "peak memory, fullest rank": run => value(run, (_, r) => bytes(Math.max(...r.memory))),
      "sent a step, rank 0": run => { const r = lastOf(run, x => Object.keys(x.sent || {}).length); return r ? bytes(Object.values(r.sent).reduce((a, b) => a + b, 0)) : "nothing"; },
      "trained for": run => value(run, (_, r) => clock(r.seconds)),
    };
    return h("section", { "aria-labelledby": "beside-title" }, h("h2", { id: "beside-title" }, "Side by side"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "the table of both runs" }, h("table", {},
      h("thead", {}, h("tr", {}, h("td", {}), runs.map(run => h("th", { scope: "col", class: "n" }, run.name)))),
      h("tbody", {}, Object.entries(rows).map(([name, f]) => h("tr", {}, h("th", { scope: "row" }, name), runs.map(run => h("td", { class: "n" }, f(run)))))))));
  }
  function differ() {
    const told = given.differences || [];
    return h("section", { "aria-labelledby": "differ-title" }, h("h2", { id: "differ-title" }, "What the jobs say differently"), told.length
      ? h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "differences of the jobs" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), runs.map(run => h("th", { scope: "col" }, run.name)))),
        h("tbody", {}, told.map(([key, a, b]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, a), h("td", {}, b))))))
      : h("p", { class: "note" }, "Nothing."));
  }

  // ---- the page

  const FILLS = { holds: lattice, memory, traffic, pipeline, events, samples, job, made };
  const filled = {};
  function refill(name) {
    const node = document.getElementById(name), content = FILLS[name](runs[0]);
    node.hidden = content === null;
    node.replaceChildren();
    if (content !== null) add(node, content);
  }
  function fill() {
    head();
    const seen = { holds: ["holds"], memory: ["records"], traffic: ["records"], pipeline: ["timeline"], events: ["events"], samples: ["events"], job: ["job"], made: ["versions", "flops"] };
    document.getElementById("figures").replaceChildren(...runs.slice(0, several ? 0 : 1).map(figures));
    if (!several) for (const name of Object.keys(FILLS)) {
      const text = JSON.stringify(seen[name].map(key => key === "records" ? last(runs[0]) : runs[0][key]));
      if (filled[name] !== text) { filled[name] = text; refill(name); }
    }
    for (const chart of charts) chart.draw();
  }
  function build() {
    const place = name => h("section", { id: name, "aria-labelledby": `${name}-title` });
    const pair = h("div", { class: "pair" }, small.map(([id, chart]) => chart.section(id)));
    const main = document.getElementById("main");
    add(main, h("div", { id: "figures" }));
    if (several) add(main, beside());
    add(main, [lossChart.section("loss"), pair]);
    if (several) add(main, differ());
    else add(main, [["holds", "memory", "traffic", "pipeline", "events", "samples"].map(place), h("div", { class: "two" }, place("job"), place("made"))]);
    add(main, numbers());
    fill();
    let width = 0;
    new ResizeObserver(() => {
      if (main.clientWidth !== width) { width = main.clientWidth; for (const chart of charts) chart.draw(); }
    }).observe(main);
  }
  build();

  let before = "";
  async function look() {
    try {
      const answer = await fetch("data.json", { cache: "no-cache" });
      if (!answer.ok) throw new Error(answer.statusText);
      const text = await answer.text(), again = lost;
      lost = false;
      if (text !== before || again) { before = text; runs = [JSON.parse(text)]; fill(); }
    } catch (error) {
      if (!lost) { lost = true; head(); }
    }
    setTimeout(look, 2000);
  }
  if (live) setTimeout(look, 2000);
})();
