// Line charts: one metric of one run, or of several runs over each other.

import { bytes, colour, el, hideTip, number, showTip, svg, tickText, ticks } from "./dom.js";

const WIDTH = 360, HEIGHT = 176, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22, MOST = 700;

/** Mean over up to `reach` neighbours on either side: unlike an exponential average it does not lag. */
function smoothed(values, reach) {
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

/** At most MOST points, evenly chosen; the ends stay. */
function thinned(line) {
  const n = line.steps.length;
  if (n <= MOST) return line;
  const chosen = Array.from({ length: MOST }, (_, i) => Math.round((i * (n - 1)) / (MOST - 1)));
  return { ...line, steps: chosen.map((i) => line.steps[i]), values: chosen.map((i) => line.values[i]) };
}

const path = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;

/**
 * A chart in a card.
 *   title, unit, doc  what is shown; onRemove: puts a button there
 *   x                 how a place on the x axis is told, by default "step N"
 *   figure            how a value is told
 * `draw(lines)`: [{name, colour, steps, values, per}], in the order of the legend.
 */
export function lineChart({ title, unit = "", doc = "", onRemove, x = (s) => `step ${s}`, figure = number, ticksOf }) {
  const now = el("span", { class: "now" });
  const remove = onRemove && el("button", {
    type: "button", class: "quiet close", "aria-label": `Remove ${title}`, text: "×", on: { click: onRemove },
  });
  const heading = el("h3", {}, el("span", { class: "what", text: title }), el("span", { class: "unit", text: unit }), now, remove);
  const legend = el("div", { class: "legend" });
  const note = el("p", { class: "doc", text: doc });
  const holder = el("div", { class: "plot", role: "img", tabindex: 0 });
  const card = el("article", { class: "card chart", "data-metric": title }, heading, holder, legend, note);
  let drawn = [], place = null, at = null;

  function point(step) {
    if (place === null) return;
    const steps = drawn.map((line) => nearest(line.steps, step)).filter((i) => i !== null);
    if (!steps.length) return;
    at = drawn.map((line) => line.steps[nearest(line.steps, step)]).reduce((a, b) =>
      (Math.abs(b - step) < Math.abs(a - step) ? b : a));
    const cross = holder.querySelector(".cross");
    const px = place(at, 0)[0];
    cross.setAttribute("x1", px);
    cross.setAttribute("x2", px);
    cross.classList.add("on");
    const told = [], dots = [];
    for (const line of drawn) {
      const i = line.steps.indexOf(at);
      if (i < 0) continue;
      const [cx, cy] = place(at, line.values[i]);
      dots.push(svg("circle", { class: "dot", cx, cy, r: 3.5, style: { fill: line.colour } }));
      told.push(drawn.length > 1 ? `${line.name}: ${figure(line.values[i])}` : figure(line.values[i]));
    }
    holder.querySelector(".dots").replaceChildren(...dots);
    const box = holder.firstChild.getBoundingClientRect();
    showTip(box.left + (px / WIDTH) * box.width, box.top + 28, drawn.length > 1 ? x(at) : `${x(at)}: ${told[0]}`,
      ...(drawn.length > 1 ? told : []));
  }

  function leave() {
    at = null;
    holder.querySelector(".cross")?.classList.remove("on");
    holder.querySelector(".dots")?.replaceChildren();
    hideTip();
  }

  function key(event) {
    if (event.key === "Escape") return leave();
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || !drawn.length) return;
    const steps = drawn[0].steps;
    const from = at === null ? (event.key === "ArrowLeft" ? steps.length : -1) : nearest(steps, at);
    point(steps[Math.max(0, Math.min(steps.length - 1, from + (event.key === "ArrowLeft" ? -1 : 1)))]);
    event.preventDefault();
  }

  holder.addEventListener("pointermove", (event) => {
    if (place === null) return;
    const box = holder.firstChild.getBoundingClientRect();
    point(place.invert(((event.clientX - box.left) / box.width) * WIDTH));
  });
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("keydown", key);
  holder.addEventListener("blur", leave);

  return {
    node: card,
    draw(lines) {
      drawn = lines.filter((line) => line.steps.length).map(thinned);
      const kept = at;
      if (!drawn.length) {
        place = null;
        holder.replaceChildren(el("p", { class: "muted", text: "no values yet" }));
        now.textContent = "";
        return;
      }
      const per = Math.max(...lines.map((line) => line.per ?? 1));
      const made = plot(drawn, { label: `${title} ${unit}`, figure, ticksOf });
      place = made.place;
      holder.replaceChildren(made.node);
      holder.setAttribute("aria-label", made.label);
      now.textContent = drawn.length === 1 ? figure(lines.find((line) => line.steps.length).values.at(-1)) : "";
      legend.replaceChildren(...(drawn.length > 1 ? drawn.map((line) =>
        el("span", {}, el("i", { style: { background: line.colour } }), line.name)) : []));
      note.textContent = per > 1 ? `${doc} Each point is the mean of ${per} steps.` : doc;
      if (kept !== null) point(kept);
    },
  };
}

function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
}

function plot(lines, { label, figure, ticksOf }) {
  const xs = lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]);
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const value of line.values) { low = Math.min(low, value); high = Math.max(high, value); }
  const unit = figure === bytes && high > 0 ? 1024 ** Math.floor(Math.log(high) / Math.log(1024)) : 1; // ticks are round in MiB, GiB
  const rows = ticks(low / unit, high / unit).map((row) => row * unit);
  const left = Math.min(...xs), right = Math.max(Math.max(...xs), left + (ticksOf ? 1e-3 : 1));
  const inner = WIDTH - LEFT - RIGHT, tall = HEIGHT - TOP - BOTTOM, span = rows.at(-1) - rows[0];
  const place = (step, value) => [LEFT + ((step - left) / (right - left)) * inner, TOP + ((rows.at(-1) - value) / span) * tall];
  place.invert = (px) => left + ((px - LEFT) / inner) * (right - left);
  const node = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  const told = lines.map((l) => `${l.name} ${figure(l.values[0])} to ${figure(l.values.at(-1))}`).join(", ");
  for (const row of rows) {
    const y = place(left, row)[1];
    node.append(svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", text: figure === number ? tickText(row, rows[1] - rows[0]) : figure(row) }));
  }
  const columns = ticksOf ? ticksOf(left, right) : ticks(left, right, 5, true).map((s) => [s, number(s)]);
  for (const [step, text] of columns) {
    if (step < left || step > right) continue;
    const anchor = ticksOf && step === right ? "end" : ticksOf && step === left ? "start" : "middle";
    node.append(svg("text", { x: place(step, 0)[0], y: HEIGHT - 6, "text-anchor": anchor, text }));
  }
  for (const line of lines) {
    const at = line.steps.map((step, i) => place(step, line.values[i]));
    if (at.length === 1) {
      node.append(svg("circle", { cx: at[0][0], cy: at[0][1], r: 3, style: { fill: line.colour } }));
      continue;
    }
    const n = at.length;
    if (line.plain || n < 8) {
      node.append(svg("path", { class: "smooth", d: path(at), style: { stroke: line.colour } }));
      if (n < 8) node.append(...at.map(([cx, cy]) => svg("circle", { cx, cy, r: 2.5, style: { fill: line.colour } })));
      continue;
    }
    const soft = smoothed(line.values, 1 + Math.floor(n / 12)).map((value, i) => place(line.steps[i], value));
    node.append(svg("path", { class: lines.length > 1 ? "raw faint" : "raw", d: path(at), style: { stroke: line.colour } }),
      svg("path", { class: "smooth", d: path(soft), style: { stroke: line.colour } }));
  }
  node.append(svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM }), svg("g", { class: "dots" }));
  return { node, place, label: `${label}: ${told}. Arrow keys read values.` };
}

/** All metrics of a run as a table with their meaning; ticked ones are `chosen`. `change(name, on)` is told. */
export function metricTable(chosen, change) {
  const filter = el("input", { type: "search", placeholder: "filter by name or meaning", "aria-label": "Filter metrics" });
  const body = el("tbody");
  const count = el("span", { class: "muted" });
  const head = el("tr", {}, ["show", "name", "last", "unit", "meaning"].map((text) =>
    el("th", { scope: "col", class: text === "last" ? "n" : null, text })));
  const node = el("details", { class: "card metrics" },
    el("summary", {}, "All metrics ", count),
    el("p", {}, filter),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)));
  const rows = new Map();

  function sift() {
    const wanted = filter.value.toLowerCase();
    for (const [name, row] of rows) row.node.hidden = !`${name} ${row.doc}`.toLowerCase().includes(wanted);
  }
  filter.addEventListener("input", sift);

  return {
    node,
    update(metrics) {
      const names = Object.keys(metrics), before = rows.size;
      count.textContent = `(${names.length})`;
      for (const name of names) {
        const { unit, doc, value } = metrics[name];
        let row = rows.get(name);
        if (row === undefined) {
          const box = el("input", { type: "checkbox", checked: chosen.has(name), "aria-label": `Show ${name}`,
            on: { change: (event) => change(name, event.target.checked) } });
          const last = el("td", { class: "n" });
          row = { doc, last, box, node: el("tr", {}, el("td", {}, box), el("td", { class: "name", text: name }), last,
            el("td", { class: "muted", text: unit }), el("td", { text: doc })) };
          rows.set(name, row);
        }
        row.last.textContent = number(value);
        row.box.checked = chosen.has(name);
      }
      if (rows.size > before) body.replaceChildren(...[...rows.keys()].sort().map((name) => rows.get(name).node));
      sift();
    },
  };
}

/** A name's line of one run, for `draw`. */
export const lineOf = (run, name, index = 0, told = name) => ({
  name: told, colour: colour(index), ...(run.series.get(name) ?? { steps: [], values: [] }),
});
