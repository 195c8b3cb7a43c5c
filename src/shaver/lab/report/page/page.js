// The page's curves: a small SVG plot with hover and keyboard, and the controls that decide what it shows.
(() => {
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const DASHES = { map: "6 4", l1: "1.5 4", spam: "" };
const METHOD_SLOTS = { spam: 0, map: 2, l1: 5 };
const NEAR = 15; // points of accuracy below the best that the cost plot still shows
const place = (sparsity) => -Math.log10(Math.max(1 - sparsity, 1e-4));
const TICKS = [0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999];
const percent = (share) => String(Math.round(share * 1e4) / 100);

function make(name, attributes = {}, parent = null, text = null) {
  const svg = ["svg", "g", "line", "path", "text"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text; // never as markup: names come from data
  if (parent) parent.append(node);
  return node;
}

const colour = (slot) => `var(--k${slot % 9})`;

// A shape for each colour, so that curves are told apart without it.
function marker(slot, x, y, r) {
  const p = (points) => "M" + points.map(([a, b]) => `${x + a * r} ${y + b * r}`).join("L") + "Z";
  const shapes = [
    () => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    () => p([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]]),
    () => p([[0, -1.2], [1.15, 0.9], [-1.15, 0.9]]),
    () => p([[0, -1.3], [1.2, 0], [0, 1.3], [-1.2, 0]]),
    () => p([[0, 1.2], [1.15, -0.9], [-1.15, -0.9]]),
    () => p([[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]]),
    () => p([[-1.2, 0], [0.9, -1.15], [0.9, 1.15]]),
    () => p([[1.2, 0], [-0.9, -1.15], [-0.9, 1.15]]),
    () => p([[-1.2, -0.55], [1.2, -0.55], [1.2, 0.55], [-1.2, 0.55]]),
  ];
  return shapes[slot % shapes.length]();
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let p = Math.floor(low); p <= Math.ceil(high); p++)
    for (const m of high - low > 3 ? [1] : [1, 2, 5]) {
      const v = p + Math.log10(m);
      if (v >= low - 1e-9 && v <= high + 1e-9) ticks.push(v);
    }
  return ticks.length > 1 ? ticks : [low, high];
}

const short = (v) => {
  const a = Math.abs(v);
  if (a >= 1e9) return +(v / 1e9).toPrecision(3) + " G";
  if (a >= 1e6) return +(v / 1e6).toPrecision(3) + " M";
  if (a >= 1e4) return +(v / 1e3).toPrecision(3) + " k";
  return String(+v.toPrecision(3));
};

// spec: {lines: [{label, slot, dash, hollow, strong, points: [{x, y, e, text}]}], x: {low, high, ticks, label, show},
//        y: {label, text}, joined}; x is already placed on its scale.
class Plot {
  constructor(host) {
    this.host = host;
    this.width = 0;
    this.at = null;
    new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - this.width) > 1 && this.spec) this.draw(this.spec);
    }).observe(host);
  }

  draw(spec) {
    this.spec = spec;
    this.at = null;
    const focused = this.svg === document.activeElement && this.svg;
    this.host.replaceChildren();
    this.svg = null;
    if (!spec.lines.some((line) => line.points.length)) {
      make("p", { class: "empty" }, this.host, "Nothing is selected, or the selection was not measured.");
      return;
    }
    const width = (this.width = Math.max(this.host.clientWidth, 280));
    const narrow = width < 520;
    const height = narrow ? 300 : Math.min(440, Math.max(320, width * 0.42));
    const box = (this.box = { left: 50, right: width - 12, top: 22, bottom: height - 42 });
    const few = spec.lines.length <= 4; // more bands than that hide the curves; then a curve's own shows on hover
    const ys = spec.lines.flatMap((l) => l.points.flatMap((p) => (few ? [p.y - (p.e || 0), p.y + (p.e || 0)] : [p.y])));
    let low = Math.min(...ys), high = Math.max(...ys);
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    low = spec.y.floor !== undefined ? Math.max(spec.y.floor, low - pad) : low - pad;
    high = spec.y.ceiling !== undefined ? Math.min(spec.y.ceiling, high + pad) : high + pad;
    if (high <= low) [low, high] = [low - 1, high + 1];
    const X = (v) => box.left + ((v - spec.x.low) / (spec.x.high - spec.x.low || 1)) * (box.right - box.left);
    const Y = (v) => box.bottom - ((v - low) / (high - low)) * (box.bottom - box.top);
    const svg = (this.svg = make("svg", {
      viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", "aria-roledescription": "chart",
      "aria-label": `${spec.y.label} over ${spec.x.label}: ${spec.lines.length} curves. Arrow keys read values.`,
    }, this.host));
    for (const tick of niceTicks(low, high, narrow ? 4 : 6)) {
      make("line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(tick), y2: Y(tick) }, svg);
      make("text", { x: box.left - 8, y: Y(tick) + 4, "text-anchor": "end" }, svg, short(tick));
    }
    let last = -Infinity;
    for (const tick of spec.x.ticks) {
      const x = X(tick.at);
      make("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 5 }, svg);
      if (x - last < 30) continue;
      last = x;
      make("text", { x, y: box.bottom + 19, "text-anchor": "middle" }, svg, tick.text);
    }
    make("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
    make("text", { x: 0, y: 9, "text-anchor": "start" }, svg, spec.y.label);
    make("text", { x: box.right, y: height - 4, "text-anchor": "end" }, svg, spec.x.label);
    this.guide = make("line", { class: "guide", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    this.groups = spec.lines.map((line) => {
      const g = make("g", few ? { class: "few" } : {}, svg);
      const dots = line.points.map((p) => ({ ...p, px: X(p.x), py: Y(p.y) }));
      if (spec.joined && line.points.some((p) => p.e)) {
        const edge = (sign) => line.points.map((p) => `${X(p.x)} ${Y(Math.min(high, Math.max(low, p.y + sign * (p.e || 0))))}`);
        make("path", { class: "band", d: `M${edge(1).join("L")}L${edge(-1).reverse().join("L")}Z`, style: `fill:${colour(line.slot)}` }, g);
      }
      if (spec.joined)
        make("path", {
          class: "curve", d: "M" + dots.map((p) => `${p.px} ${p.py}`).join("L"), "stroke-dasharray": line.dash,
          "stroke-width": line.strong ? 2.8 : 1.6, style: `stroke:${colour(line.slot)}`,
        }, g);
      if (!spec.joined || dots.length < 40)
        make("path", {
          d: dots.map((p) => marker(line.slot, p.px, p.py, line.strong ? 3.6 : 2.9)).join(""),
          style: `fill:${line.hollow ? "var(--card)" : colour(line.slot)};stroke:${colour(line.slot)};stroke-width:1.2`,
        }, g);
      return { g, dots, line };
    });
    if (spec.front) {
      const stairs = spec.front.map((p, i) => (i ? `H${X(p.x)}V${Y(p.y)}` : `M${X(p.x)} ${Y(p.y)}`));
      const d = `${stairs.join("")}H${box.right}`;
      make("path", { class: "curve", d, "stroke-width": 1.2, style: "stroke:var(--ink)" }, svg);
    }
    this.tip = make("div", { class: "tip", hidden: "", "aria-live": "polite" }, this.host);
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerdown", (event) => this.point(event));
    svg.addEventListener("pointerleave", () => this.show(null));
    svg.addEventListener("blur", () => this.show(null));
    svg.addEventListener("keydown", (event) => this.key(event));
    if (focused) svg.focus();
  }

  point(event) {
    const frame = this.svg.getBoundingClientRect();
    const scale = this.width / frame.width;
    const mx = (event.clientX - frame.left) * scale, my = (event.clientY - frame.top) * scale;
    let best = null, least = Infinity;
    this.groups.forEach((group, line) => group.dots.forEach((dot, index) => {
      const away = (dot.px - mx) ** 2 * (this.spec.joined ? 4 : 1) + (dot.py - my) ** 2;
      if (away < least) [least, best] = [away, { line, index }];
    }));
    this.show(best);
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 };
    if (event.key === "Escape") return this.show(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const step = moves[event.key], at = this.at;
    if (!at) return this.show({ line: 0, index: 0 });
    const count = this.groups.length;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const length = this.groups[at.line].dots.length;
      return this.show({ line: at.line, index: Math.min(length - 1, Math.max(0, at.index + step)) });
    }
    const here = this.groups[at.line].dots[at.index].x;
    for (let i = 1; i <= count; i++) {
      const line = (at.line + step * i + count * i) % count;
      const dots = this.groups[line].dots;
      if (!dots.length) continue;
      const near = dots.reduce((b, d, j) => (Math.abs(d.x - here) < Math.abs(dots[b].x - here) ? j : b), 0);
      return this.show({ line, index: near });
    }
  }

  show(at) {
    this.at = at;
    this.groups.forEach((group, i) => {
      group.g.classList.toggle("faint", at !== null && i !== at.line);
      group.g.classList.toggle("near", at !== null && i === at.line);
    });
    this.tip.hidden = at === null;
    this.guide.setAttribute("visibility", at && this.spec.joined ? "visible" : "hidden");
    if (at === null) return;
    const group = this.groups[at.line], dot = group.dots[at.index];
    this.guide.setAttribute("x1", dot.px);
    this.guide.setAttribute("x2", dot.px);
    this.tip.replaceChildren();
    make("b", {}, this.tip, dot.title || this.spec.x.show(dot.x));
    const table = make("table", {}, this.tip);
    let rows = this.spec.joined
      ? this.groups.flatMap((g) => g.dots.filter((d) => Math.abs(d.x - dot.x) < 1e-9).slice(0, 1).map((d) => ({ g, d })))
      : [{ g: group, d: dot }];
    rows.sort((a, b) => b.d.y - a.d.y);
    const mine = rows.findIndex((r) => r.g === group);
    const most = 12;
    const from = Math.max(0, Math.min(mine - 5, rows.length - most));
    const shown = rows.slice(from, from + most);
    for (const { g, d } of shown) {
      const row = make("tr", g === group ? { class: "near" } : {}, table);
      const cell = make("td", {}, row);
      cell.append(swatch(g.line));
      cell.append(g.line.label);
      make("td", {}, row, d.text);
    }
    if (rows.length > shown.length) make("div", {}, this.tip, `and ${rows.length - shown.length} more`);
    const frame = this.svg.getBoundingClientRect().width / this.width;
    const room = this.host.clientWidth - this.tip.offsetWidth;
    const right = dot.px * frame + 16;
    const x = right <= room ? right : dot.px * frame - this.tip.offsetWidth - 16;
    this.tip.style.left = `${Math.max(0, Math.min(x, room))}px`;
    this.tip.style.top = `${Math.max(0, Math.min(dot.py * frame - 20, this.svg.clientHeight - this.tip.offsetHeight))}px`;
  }
}

function swatch(line) {
  const svg = make("svg", { class: "swatch", viewBox: "0 0 18 10", "aria-hidden": "true" });
  if (line.slot === null) make("path", { d: "M0 5H18", "stroke-dasharray": line.dash, "stroke-width": 2, style: "stroke:var(--ink);fill:none" }, svg);
  else {
    if (!line.unjoined) make("path", { d: "M0 5H18", "stroke-dasharray": line.dash ?? "", "stroke-width": 1.8, style: `stroke:${colour(line.slot)};fill:none` }, svg);
    make("path", { d: marker(line.slot, 9, 5, 3.4), style: `fill:${line.hollow ? "var(--card)" : colour(line.slot)};stroke:${colour(line.slot)};stroke-width:1.2` }, svg);
  }
  return svg;
}

function legend(host, entries) {
  host.replaceChildren();
  for (const entry of entries) {
    const item = make("li", {}, host);
    item.append(swatch(entry));
    item.append(entry.label);
  }
}

// A row of check boxes or radio buttons; returns what is chosen.
function chips(host, name, options, chosen, kind, changed) {
  const legendNode = host.querySelector("legend");
  host.replaceChildren(legendNode);
  host.hidden = options.length < 2;
  for (const [value, label] of options) {
    const chip = make("label", { class: "chip" }, host);
    const input = make("input", { type: kind, name, value }, chip);
    input.checked = chosen.has(value);
    make("span", {}, chip, label);
    input.addEventListener("change", () => {
      if (kind === "radio") chosen.clear();
      input.checked ? chosen.add(value) : chosen.delete(value);
      changed();
    });
  }
}

function choices(select, options, changed, first = 0) {
  for (const [value, label] of options) make("option", { value }, select, label);
  select.value = String(Math.max(0, first));
  select.closest(".control").hidden = options.length < 2;
  select.addEventListener("change", changed);
}

const unique = (values) => [...new Set(values)];

// ——— Curves over sparsity ———
function explorer() {
  const plot = new Plot(byId("curves-plot"));
  const able = data.experiments.filter((e) => e.curves.length);
  const metric = new Set([data.metrics[0].key]);
  const state = {};
  const names = {
    method: data.trained, criterion: Object.fromEntries(Object.entries(data.criteria).map(([k, v]) => [k, v.name])),
    prior: {}, curvature: {}, stage: data.stages,
  };
  const dimensions = ["method", "criterion", "prior", "curvature", "stage"];
  let experiment, asked = null; // asked: the colour's meaning, once a reader has chosen it
  const value = (curve, dimension) => curve[dimension];

  function begin() {
    experiment = able[+byId("curves-experiment").value || 0];
    for (const dimension of dimensions) {
      const all = unique(experiment.curves.map((c) => value(c, dimension)).filter((v) => v !== ""));
      let wanted = all;
      if (dimension === "criterion") wanted = all.includes(experiment.main) ? [experiment.main] : all.slice(0, 1);
      if (dimension === "prior") wanted = all.includes("parameter-wise") ? ["parameter-wise"] : all.slice(0, 1);
      if (dimension === "curvature") wanted = all.slice(0, 1);
      if (dimension === "stage") wanted = all.filter((v, i) => i === 0 || v === "repaired");
      state[dimension] = new Set(wanted);
      chips(byId(`curves-${dimension}`), `curves-${dimension}`, all.map((v) => [v, names[dimension][v] ?? v]), state[dimension], "checkbox", draw);
    }
    const measured = data.metrics.filter((m) => experiment.curves.some((c) => c.y[m.key]));
    if (!measured.some((m) => metric.has(m.key))) { metric.clear(); metric.add(measured[0].key); }
    chips(byId("curves-metric"), "curves-metric", measured.map((m) => [m.key, m.name]), metric, "radio", draw);
    draw();
  }

  function draw() {
    const chosen = data.metrics.find((m) => metric.has(m.key));
    const visible = experiment.curves.filter((c) => c.y[chosen.key] && dimensions.every((d) => value(c, d) === "" || state[d].has(value(c, d))));
    // Colour says what there is a choice of: criteria first, else priors, curvatures, methods, stages.
    const varied = ["criterion", "prior", "curvature", "method", "stage"].filter((d) => unique(visible.map((c) => value(c, d)).filter((v) => v !== "")).length > 1);
    const by = varied.includes(asked) ? asked : varied[0] || "criterion";
    const others = unique(experiment.curves.map((c) => value(c, by)));
    const slot = (c) => by === "method" ? METHOD_SLOTS[c.method] ?? 8 : by === "criterion" ? data.criteria[c.criterion].slot : value(c, by) === "" ? 7 : [0, 2, 5, 4, 3, 1, 6, 8][others.filter((v) => v !== "").indexOf(value(c, by)) % 8];
    const label = (c) => [c.method, c.criterion, c.prior, c.curvature, c.stage]
      .map((v, i) => [dimensions[i], v])
      .filter(([d, v]) => v !== "" && (d === "method" || d === "criterion" || varied.includes(d)))
      .map(([d, v]) => names[d][v] ?? v).join(", ");
    const lines = visible.map((c) => ({
      label: label(c), slot: slot(c), dash: by === "method" ? "" : DASHES[c.method] ?? "", key: value(c, by), method: c.method, stage: c.stage,
      strong: by !== "criterion" || c.criterion === "opd", hollow: by !== "stage" && c.stage !== visible[0].stage,
      points: c.x.map((s, i) => [s, c.y[chosen.key][i]]).filter(([, p]) => p).map(([s, [mean, error]]) => ({
        x: place(s), y: mean * chosen.factor, e: error === null ? 0 : error * chosen.factor,
        title: s === 0 ? "dense" : `${percent(s)} % sparsity`,
        text: (mean * chosen.factor).toFixed(chosen.digits) + (error === null ? "" : ` ± ${(error * chosen.factor).toFixed(chosen.digits)}`),
      })),
    }));
    const top = Math.max(0.5, ...visible.flatMap((c) => c.x));
    plot.draw({
      lines, joined: true,
      x: { low: 0, high: place(top), label: "share of weights removed, %", show: (v) => v,
           ticks: TICKS.filter((s) => s <= top + 1e-9).map((s) => ({ at: place(s), text: percent(s) })) },
      y: { label: chosen.title, floor: 0, ceiling: chosen.key === "accuracy" ? 100.5 : undefined },
    });
    const keys = [false, true].flatMap((hollow) => unique(lines.filter((l) => l.key !== "" && l.hollow === hollow).map((l) => l.key)).map((k) => {
      const line = lines.find((l) => l.key === k && l.hollow === hollow);
      return { label: (names[by][k] ?? k) + (hollow ? `, ${names.stage[line.stage] ?? line.stage}` : ""), slot: line.slot, dash: "", hollow };
    }));
    const methods = by === "method" ? [] : unique(lines.map((l) => l.method)).map((m) => ({ label: data.methods[m] ?? m, slot: null, dash: DASHES[m] ?? "" }));
    legend(byId("curves-key"), [...methods, ...keys]);
    const colours = byId("curves-colour");
    colours.closest(".control").hidden = varied.filter((d) => d !== "method").length < 2;
    for (const option of colours.options) option.disabled = !varied.includes(option.value);
    colours.value = by;
  }

  choices(byId("curves-experiment"), able.map((e, i) => [String(i), e.title]), begin, able.indexOf(data.experiments[data.first]));
  byId("curves-colour").addEventListener("change", (event) => { asked = event.target.value; draw(); });
  begin();
}

// ——— Quality against cost ———
function pareto() {
  const plot = new Plot(byId("pareto-plot"));
  const able = data.experiments.filter((e) => e.costs.length);
  const cost = new Set();
  const criteria = new Set();
  const accuracy = data.metrics[0];
  function begin() {
    const experiment = able[+byId("pareto-experiment").value || 0];
    if (!experiment.costs.some((c) => cost.has(c))) { cost.clear(); cost.add(experiment.costs[0]); }
    chips(byId("pareto-cost"), "pareto-cost", experiment.costs.map((c) => [c, data.costs[c]]), cost, "radio", draw);
    const there = unique(experiment.curves.map((c) => c.criterion));
    criteria.clear();
    there.filter((c) => [experiment.main, "magnitude"].includes(c)).forEach((c) => criteria.add(c));
    if (!criteria.size) criteria.add(there[0]);
    chips(byId("pareto-criterion"), "pareto-criterion", there.map((c) => [c, data.criteria[c].name]), criteria, "checkbox", draw);
    draw();
  }
  function draw() {
    const experiment = able[+byId("pareto-experiment").value || 0];
    const key = [...cost][0];
    const all = experiment.curves.filter((c) => criteria.has(c.criterion) && c.y[key] && c.y.accuracy);
    const least = Math.max(0, ...all.flatMap((c) => c.y.accuracy.filter(Boolean).map(([mean]) => mean * accuracy.factor))) - NEAR;
    const lines = all.map((c) => {
      const label = [data.methods[c.method] ?? c.method, data.criteria[c.criterion].name, ...(experiment.several ? [c.prior, c.curvature] : []), c.stage && experiment.stages.length > 1 ? data.stages[c.stage] ?? c.stage : ""].filter(Boolean).join(", ");
      return {
        label, slot: data.criteria[c.criterion].slot, dash: "", hollow: c.method !== "spam", strong: true, unjoined: true,
        points: c.x.map((s, i) => [s, c.y[key][i], c.y.accuracy[i]]).filter(([, a, b]) => a && b && b[0] * accuracy.factor >= least).map(([s, [at], [mean]]) => ({
          x: Math.log10(at), y: mean * accuracy.factor, e: 0, title: `${short(at)} ${data.costs[key]}, ${s === 0 ? "dense" : percent(s) + " % sparsity"}`,
          text: (mean * accuracy.factor).toFixed(accuracy.digits) + " %",
        })),
      };
    });
    const points = lines.flatMap((l) => l.points).sort((a, b) => a.x - b.x || b.y - a.y);
    let best = -Infinity;
    const front = points.filter((p) => p.y > best && ((best = p.y), true));
    const low = Math.min(...points.map((p) => p.x)), high = Math.max(...points.map((p) => p.x)), pad = (high - low) * 0.03 || 0.1;
    plot.draw({
      lines, joined: false, front,
      x: { low: low - pad, high: high + pad, label: `${data.costs[key]} (logarithmic)`, show: (v) => short(10 ** v),
           ticks: logTicks(low - pad, high + pad).map((at) => ({ at, text: short(10 ** at) })) },
      y: { label: accuracy.title, ceiling: 100.5, floor: 0 },
    });
    const keys = unique(all.map((c) => c.criterion)).map((c) => ({ label: data.criteria[c].name, slot: data.criteria[c].slot, unjoined: true }));
    legend(byId("pareto-key"), [{ label: "the best accuracy at each cost", slot: null, dash: "" }, ...keys]);
  }
  choices(byId("pareto-experiment"), able.map((e, i) => [String(i), e.title]), begin, able.findIndex((e) => e.costs.includes("flops")));
  begin();
}

// ——— Training ———
function training() {
  const plot = new Plot(byId("training-plot"));
  const able = data.experiments.filter((e) => e.histories.length);
  const quantity = new Set();
  const current = () => able[+byId("training-experiment").value || 0];
  function begin() {
    const there = Object.keys(data.quantities).filter((q) => current().histories.some((h) => h.y[q]));
    if (!there.some((q) => quantity.has(q))) { quantity.clear(); quantity.add(there[0]); }
    chips(byId("training-quantity"), "training-quantity", there.map((q) => [q, data.quantities[q]]), quantity, "radio", draw);
    draw();
  }
  function draw() {
    const key = [...quantity][0];
    const lines = current().histories.map((h, i) => ({
      label: h.label, slot: [7, 0, 2, 5, 4, 3, 1, 6, 8][i % 9], dash: DASHES[h.method] ?? "", strong: h.method === "spam",
      points: (h.y[key] || []).map(([x, y]) => ({ x, y, e: 0, title: `epoch ${x}`, text: short(y) })),
    })).filter((l) => l.points.length);
    const last = Math.max(2, ...lines.flatMap((l) => l.points.map((p) => p.x)));
    plot.draw({
      lines, joined: true,
      x: { low: 1, high: last, label: "epoch", show: (v) => v, ticks: unique([1, ...niceTicks(1, last, 8).filter(Number.isInteger)]).map((at) => ({ at, text: String(at) })) },
      y: { label: data.quantities[key], floor: key === "log_evidence" ? undefined : 0 },
    });
    legend(byId("training-key"), lines);
  }
  choices(byId("training-experiment"), able.map((e, i) => [String(i), e.title]), begin, able.indexOf(data.experiments[data.first]));
  begin();
}

// ——— Light, dark, print ———
function theme() {
  const button = byId("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
}

theme();
// A table that is wider than its place says so.
const hint = () => document.querySelectorAll(".scroll").forEach((s) => s.classList.toggle("wide", s.scrollWidth > s.clientWidth + 1));
addEventListener("resize", hint);
document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", hint));
hint();
if (byId("curves-plot")) explorer();
if (byId("pareto-plot")) pareto();
if (byId("training-plot")) training();
})();
