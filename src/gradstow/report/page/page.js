"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const plan = data.plan, limited = Boolean(plan.budget);
const steps = limited ? ["plain", "planned"] : ["plain"];
const titles = { plain: "plain PyTorch", planned: "planned" };
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const drawn = ["svg", "path", "line", "text", "circle", "g", "title"].includes(name);
  const element = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, value = count;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${fixed(value, unit === 4 ? 2 : Math.min(unit, 1))} ${units[unit]}`;
}

// as Python rounds, so that the page and the command print the same: a tie goes to the even digit
function fixed(value, digits) {
  const exact = value.toFixed(digits + 40), cut = exact.slice(0, -40).replace(/\.$/, "");
  return exact.endsWith(`5${"0".repeat(39)}`) && "02468".includes(cut.at(-1)) ? cut : value.toFixed(digits);
}

function seconds(value) {
  if (value >= 1) return `${fixed(value, 2)} s`;
  return value >= 1e-3 ? `${fixed(value * 1e3, 1)} ms` : `${fixed(value * 1e6, 0)} µs`;
}

const percent = (part, whole) => (whole ? `${fixed(100 * part / whole, 1)} %` : "");

// what the page is about, and its main numbers
function heading() {
  $("title").textContent = `${plan.model || "A model"}: where a training step's memory goes`;
  document.title = `${plan.model || "A model"} · gradstow`;
  const versions = Object.entries(plan.versions).map(([name, text]) => `${name} ${text}`).join(", ");
  $("about").textContent = `batch ${plan.batch} on ${plan.device} · ${versions}`;
  const cards = [["plain PyTorch's peak", bytes(data.peaks.plain.peak_bytes), found("plain")]];
  if (limited) {
    cards.push(["planned peak", bytes(data.peaks.planned.peak_bytes), found("planned")]);
    cards.push(["budget", plan.budget, `${percent(plan.predicted_step_peak_bytes, plan.plain_step_peak_bytes)} of plain's step peak`]);
    cards.push(["time added", `${fixed(100 * added(), 1)} %`, `${plan.rerun_ops} ops rerun`]);
  } else {
    cards.push(["a step of plain PyTorch", seconds(plan.plain_seconds), "sum of its ops' times"]);
  }
  cards.push(["resident", bytes(plan.resident_bytes), "parameters, buffers, optimizer, batch"]);
  $("numbers").append(...cards.map(([name, value, more]) => make("div", { class: "card" }, name, make("b", {}, value), make("span", {}, more))));
}

function found(step) {
  const run = data.measured[step];
  return run ? `${bytes(run.peak_bytes)} measured` : "predicted";
}

// the timelines: one picture per step on the same scale
class Chart {
  constructor(step, most) {
    this.step = step; this.line = data.timelines[step]; this.most = most;
    this.count = this.line.bytes.length;
    this.svg = make("svg", { viewBox: "0 0 1000 240", preserveAspectRatio: "none", tabindex: "0", role: "img" });
    this.peak = this.line.bytes.reduce((best, value, i) => (value > this.line.bytes[best] ? i : best), 0);
    this.svg.setAttribute("aria-label", `${titles[step]}: live memory over one step, peak ${bytes(this.line.bytes[this.peak] || 0)}`);
    const figure = make("div", { class: "chart" }, make("h3", {}, `${titles[step]}: peak ${bytes(data.peaks[step].peak_bytes)}`), this.svg);
    $("charts").append(figure);
    this.now = this.peak;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("focus", () => this.show(this.now));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.draw();
  }

  x(index) { // where moment `index` starts; `count` is the end
    if (this.across === "ops") return 1000 * index / Math.max(this.count, 1);
    const total = this.line.seconds[this.count - 1] || 1;
    return index ? 1000 * this.line.seconds[index - 1] / total : 0;
  }

  y(level) { return 232 - 220 * level / this.most; }

  draw() {
    const timed = (this.line.seconds[this.count - 1] || 0) > 0;
    this.across = timed ? $("across").value : "ops";
    this.svg.replaceChildren();
    let below = new Array(this.count).fill(0);
    for (const [part, levels] of Object.entries(this.line.parts)) {
      const above = below.map((value, i) => value + levels[i]);
      this.svg.append(make("path", { d: this.area(below, above), fill: `var(--${part})` }, make("title", {}, data.parts[part])));
      below = above;
    }
    if (limited) {
      const level = this.y(budgetBytes());
      this.svg.append(make("line", { class: "budget", x1: 0, x2: 1000, y1: level, y2: level, "vector-effect": "non-scaling-stroke" }));
    }
    this.mark = make("line", { class: "mark", y1: 0, y2: 240, x1: -9, x2: -9, "vector-effect": "non-scaling-stroke" });
    this.svg.append(this.mark);
  }

  area(low, high) {
    const forth = [], back = [];
    for (let i = 0; i < this.count; i += 1) {
      const [left, right] = [this.x(i).toFixed(2), this.x(i + 1).toFixed(2)];
      forth.push(`${left} ${this.y(high[i]).toFixed(1)}L${right} ${this.y(high[i]).toFixed(1)}`);
      back.push(`${right} ${this.y(low[i]).toFixed(1)}L${left} ${this.y(low[i]).toFixed(1)}`);
    }
    return this.count ? `M${forth.join("L")}L${back.reverse().join("L")}Z` : "";
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = 1000 * (event.clientX - box.left) / box.width;
    let [low, high] = [0, this.count - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.x(middle + 1) < x) low = middle + 1; else high = middle;
    }
    this.show(low);
  }

  key(event) {
    const moves = { ArrowRight: this.now + 1, ArrowLeft: this.now - 1, PageDown: this.now + 20, PageUp: this.now - 20, Home: 0, End: this.count - 1, p: this.peak, P: this.peak };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.show(Math.min(Math.max(moves[event.key], 0), this.count - 1));
  }

  // what holds it: the op that reads it last
  until(life) { return life.last < this.count ? this.line.texts[this.line.at[life.last]] : "the end of the step"; }

  show(index) {
    if (!this.count) return;
    this.now = index;
    const middle = (this.x(index) + this.x(index + 1)) / 2;
    this.mark.setAttribute("x1", middle);
    this.mark.setAttribute("x2", middle);
    const alive = this.line.lives.filter((life) => life.first <= index && index <= life.last).sort((a, b) => b.bytes - a.bytes);
    const parts = Object.entries(this.line.parts).filter(([, levels]) => levels[index]);
    const named = parts.map(([part, levels]) => `${data.parts[part]} ${bytes(levels[index])}`).join(", ");
    const list = alive.slice(0, 8).map((life) => make("li", {}, `${bytes(life.bytes)} ${life.name}${life.module ? ` of ${life.module}` : ""} (${life.part}), until ${this.until(life)}`));
    const rest = alive.length > 8 ? [make("p", {}, `and ${alive.length - 8} smaller values, ${bytes(alive.slice(8).reduce((sum, life) => sum + life.bytes, 0))}`)] : [];
    $("moment").replaceChildren(
      make("b", {}, `${titles[this.step]}, moment ${index + 1} of ${this.count}: ${bytes(this.line.bytes[index])}`),
      make("div", {}, this.line.texts[this.line.at[index]]), make("div", {}, named), make("ol", {}, ...list), ...rest);
  }
}

function budgetBytes() { return plan.resident_bytes + plan.step_budget_bytes; }

function memory() {
  const most = Math.max(...steps.map((step) => data.peaks[step].peak_bytes), limited ? budgetBytes() : 0, 1);
  const charts = steps.map((step) => new Chart(step, most));
  $("across").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
  const used = new Set(steps.flatMap((step) => Object.keys(data.timelines[step].parts)));
  const marks = Object.keys(data.parts).filter((part) => used.has(part)).map((part) => make("span", {}, make("i", { style: `background: var(--${part})` }), data.parts[part]));
  if (limited) marks.push(make("span", {}, `╌ budget ${plan.budget}`));
  $("legend").append(...marks);
  $("moment").textContent = "No moment is chosen.";
  const rows = Object.keys(data.parts).filter((part) => steps.some((step) => data.peaks[step].parts[part]));
  table($("parts"), ["", ...steps.map((step) => titles[step])],
    [...rows.map((part) => [data.parts[part], ...steps.map((step) => bytes(data.peaks[step].parts[part] || 0))]),
      ["all", ...steps.map((step) => bytes(data.peaks[step].peak_bytes))]]);
  const places = steps.map((step) => make("p", { class: "hint" }, `${titles[step]}'s peak is at ${data.peaks[step].at || "no moment"}`));
  $("parts").after(...places);
}

function table(target, head, rows, numbers = 1) {
  const kind = (i) => (i >= numbers ? { class: "number" } : {});
  const body = rows.map((row) => make("tr", {}, ...row.map((cell, i) => (i ? make("td", kind(i), String(cell)) : make("th", { scope: "row" }, String(cell))))));
  target.replaceChildren(make("thead", {}, make("tr", {}, ...head.map((cell, i) => make("th", { scope: "col", ...kind(i) }, cell)))), make("tbody", {}, ...body));
}

// the modules
function modules() {
  $("step").append(...steps.map((step) => make("option", { value: step }, titles[step])));
  const show = () => {
    const step = $("step").value, root = data.modules[step];
    $("tree").replaceChildren(branch(root, root.bytes, 0));
    $("groups").replaceChildren(group("Ops that made it", data.ops[step]), group("Lines that made it", data.lines[step]));
    held(data.peaks[step].rows);
  };
  $("step").addEventListener("change", show);
  show();
  saved();
}

function branch(node, most, level) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, ...Object.entries(node.parts).map(([part, count]) => make("i", { style: `width: ${100 * count / most}%; background: var(--${part})`, title: data.parts[part] })));
  const label = [bar, make("span", { class: "size" }, bytes(node.bytes)), `${node.name || "the model"}${node.times > 1 ? ` ×${node.times}` : ""}${node.members ? `: ${node.members}` : ""}`];
  const children = [...node.children].sort((a, b) => b.bytes - a.bytes);
  if (!children.length) return make("div", { class: "leaf" }, ...label);
  const details = make("details", level < 2 ? { open: "" } : {}, make("summary", {}, ...label));
  const fill = () => { if (details.children.length === 1) details.append(...children.map((child) => branch(child, most, level + 1))); };
  if (level < 2) fill(); else details.addEventListener("toggle", fill, { once: true });
  return details;
}

const LISTED = 12;

function group(title, counts) {
  const named = Object.entries(counts).filter(([name]) => name).sort((a, b) => b[1] - a[1]), target = make("table");
  const lines = named.slice(0, LISTED).map(([name, count]) => [name, bytes(count)]), rest = named.slice(LISTED);
  if (rest.length) lines.push([`${rest.length} more`, bytes(sum(rest.map(([, count]) => count)))]);
  table(target, [title, "at the peak"], lines);
  return make("div", { class: "wide" }, target);
}

const sum = (counts) => counts.reduce((total, count) => total + count, 0);

// every tensor at the peak, and what holds it; the largest first
function held(rows) {
  const lines = rows.slice(0, FIRST).map((row) => [`${row.name}${row.shape.length ? ` [${row.shape.join(", ")}]` : ""}`, row.part, row.module, row.until, bytes(row.bytes)]);
  const rest = rows.slice(FIRST);
  if (rest.length) lines.push([`${rest.length} more`, "", "", "", bytes(sum(rest.map((row) => row.bytes)))]);
  table($("held"), ["Tensor", "Part", "Module", "Held until", "Bytes"], lines, 4);
}

// what the forward keeps for the backward, by the module that makes it: predicted, and measured beside it
function saved() {
  const run = data.measured.plain, counted = [data.saved, ...(run && run.saved ? [run.saved] : [])];
  const names = [...new Set(counted.flatMap((one) => Object.keys(one)))];
  const cells = (some) => counted.map((one) => bytes(sum(some.map((name) => one[name] || 0))));
  const most = (name) => Math.max(...counted.map((one) => one[name] || 0));
  names.sort((a, b) => most(b) - most(a));
  const lines = names.slice(0, LISTED).map((name) => [name || "(the model)", ...cells([name])]), rest = names.slice(LISTED);
  if (rest.length) lines.push([`${rest.length} more`, ...cells(rest)]);
  table($("saved"), ["Saved by plain PyTorch's forward, by module", ...["predicted", "measured"].slice(0, counted.length)], [...lines, ["all", ...cells(names)]]);
}

// the values
const COLUMNS = [["decision", "Decision"], ["bytes", "Bytes"], ["op", "Op"], ["module", "Module"], ["shape", "Shape"], ["reason", "Reason"], ["source", "Line"], ["seconds", "Again"]];
const FIRST = 200;
const sorting = { by: "bytes", down: true };
let all = false;

function values() {
  const head = COLUMNS.map(([key, title]) => {
    const button = make("button", { type: "button" }, title);
    button.addEventListener("click", () => { sorting.down = sorting.by === key ? !sorting.down : ["bytes", "seconds"].includes(key); sorting.by = key; rows(); });
    return make("th", { scope: "col", "data-key": key, ...(["bytes", "seconds"].includes(key) ? { class: "number" } : {}) }, button);
  });
  $("rows").tHead.append(make("tr", {}, ...head));
  const decisions = [...new Set(plan.rows.map((row) => row.decision))];
  $("decision").append(...decisions.map((name) => make("option", { value: name }, name)));
  for (const row of plan.rows) row.text = [row.name, row.decision, row.op, row.module, row.reason, row.source, row.dtype, row.region].join(" ").toLowerCase();
  $("filter").addEventListener("input", rows);
  $("decision").addEventListener("change", rows);
  $("more").addEventListener("click", () => { all = true; rows(); });
  rows();
}

function rows() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), decision = $("decision").value;
  const chosen = plan.rows.filter((row) => (!decision || row.decision === decision) && words.every((word) => row.text.includes(word)));
  const key = sorting.by, sign = sorting.down ? -1 : 1;
  chosen.sort((a, b) => sign * (typeof a[key] === "number" ? a[key] - b[key] : String(a[key]).localeCompare(String(b[key]))));
  const shown = all ? chosen : chosen.slice(0, FIRST);
  $("rows").tBodies[0].replaceChildren(...shown.map((row) => make("tr", {},
    make("td", { class: "decision", "data-is": row.decision }, row.decision), make("td", { class: "number" }, bytes(row.bytes)),
    make("td", {}, row.op), make("td", {}, row.module), make("td", {}, `${row.dtype}[${row.shape.join(", ")}]`),
    make("td", {}, row.reason), make("td", {}, row.source), make("td", { class: "number" }, row.seconds ? seconds(row.seconds) : ""))));
  for (const cell of $("rows").tHead.rows[0].cells) {
    cell.setAttribute("aria-sort", cell.dataset.key === key ? (sorting.down ? "descending" : "ascending") : "none");
  }
  const total = chosen.reduce((sum, row) => sum + row.bytes, 0);
  $("count").textContent = `${chosen.length} of ${plan.rows.length} values, ${bytes(total)}`;
  $("more").hidden = shown.length === chosen.length;
  $("more").textContent = `Show all ${chosen.length}`;
}

// the frontier
function frontier() {
  const curve = data.frontier;
  $("curve").replaceChildren();
  if (!curve) {
    $("curve").append(make("p", { class: "none" }, "Not planned. Make the page with gradstow profile --points 20, or gs.profile(..., points=20)."));
    return;
  }
  const most = Math.max(...curve.points.map((point) => point.step_peak_bytes), plan.predicted_step_peak_bytes) * 1.05;
  const slow = Math.max(...curve.points.map((point) => point.added), added(), 0.01) * 1.15;
  const wide = Math.max($("curve").clientWidth, 300), right = wide - 20; // one unit is one pixel: its text is readable on a phone
  const x = (level) => 60 + (right - 60) * level / most, y = (value) => 250 - 230 * Math.max(value, 0) / slow;
  const svg = make("svg", { viewBox: `0 0 ${wide} 290`, role: "img", "aria-label": "Added time against step peak" });
  const path = (read) => curve.points.map((point) => `${x(point.step_peak_bytes).toFixed(1)} ${y(read(point)).toFixed(1)}`).join("L");
  svg.append(make("line", { class: "axis", x1: 60, x2: right, y1: 250, y2: 250 }), make("line", { class: "axis", x1: 60, x2: 60, y1: 20, y2: 250 }));
  svg.append(make("path", { d: `M${path((point) => point.bound_added)}`, fill: "none", stroke: "var(--faint)", "stroke-dasharray": "4 4" }));
  svg.append(make("path", { d: `M${path((point) => point.added)}`, fill: "none", stroke: "var(--saved)", "stroke-width": 2 }));
  for (const point of curve.points) {
    const dot = make("circle", { cx: x(point.step_peak_bytes), cy: y(point.added), r: 5, fill: "var(--saved)" });
    dot.append(make("title", {}, `${bytes(point.step_peak_bytes)}: ${fixed(100 * point.added, 1)} % added, at least ${fixed(100 * point.bound_added, 1)} %`));
    svg.append(dot);
  }
  const proven = x(curve.proven_step_peak_bytes), onRight = proven + 150 < right;
  svg.append(make("line", { class: "budget", x1: proven, x2: proven, y1: 20, y2: 250 }), make("text", { x: proven + (onRight ? 5 : -5), y: 32, "text-anchor": onRight ? "start" : "end" }, "no schedule is under"));
  if (limited) {
    svg.append(make("circle", { id: "chosen", cx: x(plan.predicted_step_peak_bytes), cy: y(added()), r: 9, fill: "none", stroke: "var(--temporary)", "stroke-width": 3 }, make("title", {}, "the chosen plan")));
  }
  for (let i = 0; i <= 4; i += wide < 600 ? 2 : 1) {
    svg.append(make("text", { x: x(most * i / 4), y: 270, "text-anchor": i < 4 ? "middle" : "end" }, bytes(most * i / 4)), make("text", { x: 54, y: 254 - 57.5 * i, "text-anchor": "end" }, `${fixed(100 * slow * i / 4, slow < 0.1 ? 1 : 0)} %`));
  }
  svg.append(make("text", { x: (60 + right) / 2, y: 287, "text-anchor": "middle" }, wide < 600 ? "step peak; upwards: time added" : "step peak above what is resident; upwards: time added"));
  $("curve").append(make("div", { class: "chart" }, svg));
  svg.style.height = "290px";
  table($("points"), ["step peak", "of plain", "time added", "proven at least", "reruns"],
    curve.points.map((point) => [bytes(point.step_peak_bytes), `${fixed(100 * point.share, 0)} %`, `${fixed(100 * point.added, 2)} %`, `${fixed(100 * point.bound_added, 2)} %`, point.rerun_ops]));
}

function added() { return plan.plain_seconds ? plan.predicted_seconds / plan.plain_seconds - 1 : 0; }

// what is proven, and what is not
function certificate() {
  const items = [["budget", plan.budget || "none"], ["policy", plan.policy],
    ["step peak", `${bytes(plan.predicted_step_peak_bytes)} predicted, ${bytes(plan.plain_step_peak_bytes)} plain`],
    ["step time", `${seconds(plan.predicted_seconds)} predicted, ${seconds(plan.plain_seconds)} plain`],
    ["proven bound", plan.lower_bound_seconds ? `${seconds(plan.lower_bound_seconds)}: no plan of this kind is faster; this one is ${fixed(100 * plan.gap, 2)} % above` : "none: everything is stored, or no bound was asked for"]];
  if (data.frontier) items.push(["smallest step peak", `no schedule is under ${bytes(data.frontier.proven_step_peak_bytes)}`]);
  items.push(["solver", Object.entries(plan.solver).map(([name, value]) => `${name}: ${Array.isArray(value) ? value.join("; ") : value}`).join(", ") || "none"]);
  items.push(["exact", Object.keys(plan.lossy).length ? Object.entries(plan.lossy).map(([code, count]) => `no: ${count} values kept as ${code}`).join(", ") : "yes: the numbers are plain PyTorch's"]);
  items.push(["graph breaks", plan.breaks.map((one) => `${one.reason} (${one.source}), keeps ${bytes(one.bytes)}`).join("; ") || "none"]);
  items.push(["not planned", Object.entries(plan.not_planned).map(([name, count]) => `${name} (${count} ops)`).join("; ") || "nothing"]);
  for (const step of steps) {
    const run = data.measured[step];
    if (run) items.push([`measured, ${titles[step]}`, `${bytes(run.peak_bytes)} (predicted ${bytes(data.peaks[step].peak_bytes)})`]);
  }
  $("proof").append(...items.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
}

$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
heading();
memory();
modules();
values();
frontier();
addEventListener("resize", frontier);
certificate();
document.documentElement.dataset.ready = "yes";
