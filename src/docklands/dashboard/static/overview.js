// The run at a glance: figures that matter, their curves, and any other metric that one asks for.

import { lineChart, lineOf, metricTable } from "./charts.js";
import { el, mean, missing, number, seconds } from "./dom.js";

const KEY = "docklands.metrics";

export function remembered(key) {
  try { return new Set(JSON.parse(localStorage.getItem(key) ?? "[]")); } catch { return new Set(); }
}

export function remember(key, chosen) {
  try { localStorage.setItem(key, JSON.stringify([...chosen])); } catch { /* a browser without storage */ }
}

/** The curves that come first, of those that a run has: [{name, title, unit}]. */
export function firstCurves(curves, metrics) {
  const found = curves.map(([names, title, unit]) => ({ name: names.find((n) => n in metrics), title, unit }));
  const scores = Object.keys(metrics).filter((name) => /^val-core\/.*mean@\d+$/.test(name));
  const held = scores.map((name) => ({ name, title: "Held-out score", unit: name.split("/").slice(1).join("/") }));
  return [...found.slice(0, 1), ...held, ...found.slice(1)].filter((curve) => curve.name !== undefined);
}

function card(label, value, foot, kind = "") {
  return el("div", { class: "card figure" }, el("div", { class: "label", text: label }),
    el("div", { class: "value", text: value }), el("div", { class: `foot ${kind}`, text: foot }));
}

/** First and last values, each the mean of up to `most` points. */
function ends(values, most) {
  const n = Math.max(1, Math.min(most, Math.floor(values.length / 2)));
  return [mean(values.slice(0, n)), mean(values.slice(-n)), n];
}

function figures(run, curves) {
  const { state, series } = run;
  const values = (name) => series.get(name)?.values ?? [];
  const cards = [];
  const done = state.steps ? Math.min(1, state.step / state.steps) : 0;
  const pace = values("timing_s/step").slice(-10);
  const left = state.state === "running" && pace.length && state.steps ? (state.steps - state.step) * mean(pace) : null;
  const bar = el("div", { class: "bar" }, el("i", { style: { width: `${100 * done}%` } }));
  const steps = card("Step", state.steps ? `${number(state.step)} of ${number(state.steps)}` : number(state.step),
    left === null ? (pace.length ? `${seconds(mean(pace))} a step` : "") : `${seconds(mean(pace))} a step, ${seconds(left)} left`);
  steps.insertBefore(bar, steps.lastChild);
  cards.push(steps);
  for (const curve of curves.filter((c) => c.title === "Reward" || c.title === "Held-out score")) {
    const found = values(curve.name);
    if (!found.length) continue;
    const [first, last, n] = ends(found, curve.title === "Reward" ? 5 : 1);
    const kind = last > first ? "up" : last < first ? "down" : "";
    const sign = last >= first ? "+" : "−";
    const foot = found.length > 1 ? `${sign}${number(Math.abs(last - first))}, first and last ${n > 1 ? `${n} steps` : ""}` : curve.unit;
    cards.push(card(curve.title === "Reward" ? "Reward" : `Held-out, ${curve.unit}`,
      found.length > 1 ? `${number(first)} → ${number(last)}` : number(last), foot.trim(), kind));
  }
  const length = values("response_length/mean");
  if (length.length) cards.push(card("Response length", `${number(length[0])} → ${number(length.at(-1))}`, "tokens, first and last step"));
  const speed = values("perf/throughput").length ? "perf/throughput" : "perf/gen_tokens_per_s";
  if (values(speed).length) cards.push(card("Throughput", number(mean(values(speed).slice(-10))), "tokens/s, last steps"));
  return cards;
}

export const overview = {
  title: "Overview",

  async mount(root, context) {
    const chosen = remembered(KEY);
    const cards = el("div", { class: "cards" });
    const warning = el("p", { class: "card warn", hidden: true });
    const grid = el("div", { class: "grid" });
    const charts = new Map();

    function drop(name) {
      chosen.delete(name);
      remember(KEY, chosen);
      update();
    }
    const list = metricTable(chosen, (name, on) => {
      if (on) chosen.add(name); else chosen.delete(name);
      remember(KEY, chosen);
      update();
    });
    root.append(warning, cards, grid, list.node);

    async function update() {
      const { run, curves } = context;
      const metrics = await run.names();
      const first = firstCurves(curves, metrics);
      const shown = new Set(first.map((curve) => curve.name));
      const more = [...chosen].filter((name) => name in metrics && !shown.has(name))
        .map((name) => ({ name, title: name, unit: metrics[name].unit, removable: true }));
      const wanted = [...first, ...more];
      await run.load([...new Set([...wanted.map((c) => c.name), "timing_s/step", "perf/throughput", "perf/gen_tokens_per_s"])]);
      cards.replaceChildren(...figures(run, first));
      const bad = Object.entries(run.state.not_finite);
      warning.hidden = !bad.length;
      warning.textContent = `Not finite: ${bad.map(([name, { times, step }]) => `${name} (${times} times, last in step ${step})`).join(", ")}`;
      for (const name of charts.keys()) if (!wanted.some((c) => c.name === name)) charts.delete(name);
      wanted.forEach((curve, i) => {
        if (!charts.has(curve.name)) {
          const doc = `${curve.name}: ${metrics[curve.name].doc}.`;
          charts.set(curve.name, lineChart({ title: curve.title, unit: curve.unit, doc,
            onRemove: curve.removable && (() => drop(curve.name)) }));
        }
        charts.get(curve.name).draw([lineOf(run, curve.name, i)]);
      });
      const nodes = wanted.length ? wanted.map((c) => charts.get(c.name).node) : [missing("No metrics yet: metrics.jsonl is missing or empty.")];
      if (nodes.length !== grid.children.length || nodes.some((node, i) => node !== grid.children[i])) grid.replaceChildren(...nodes);
      list.update(metrics);
    }
    await update();
    return { update };
  },
};
