// Several runs over each other, and what their configurations differ in.

import { lineChart, metricTable } from "./charts.js";
import { colour, el, missing, number, section, table } from "./dom.js";
import { firstCurves, remember, remembered } from "./overview.js";

const KEY = "docklands.compare";

const plain = (value) => (value === undefined ? "(not set)" : value === null ? "null" : String(value));

export const compare = {
  title: "Compare",

  async mount(root, context) {
    const chosen = remembered(KEY);
    const off = new Set(context.runs.map((_, i) => i).slice(8)); // there are eight colours
    const runs = el("fieldset", { class: "card runs" }, el("legend", { text: "Runs" }));
    const grid = el("div", { class: "grid" });
    const differences = el("div");
    const finals = el("div");
    const charts = new Map();
    const configs = new Map();
    const list = metricTable(chosen, (name, on) => {
      if (on) chosen.add(name); else chosen.delete(name);
      remember(KEY, chosen);
      update();
    });
    context.runs.forEach((run, i) => {
      const box = el("input", { type: "checkbox", checked: !off.has(i),
        on: { change: (event) => { if (event.target.checked) off.delete(i); else off.add(i); update(); } } });
      runs.append(el("label", {}, box, el("i", { style: { background: colour(i) } }),
        el("span", { text: run.label }), el("span", { class: "muted", text: run.state.folder })));
    });
    root.append(runs, grid, list.node, section("Last values", finals), section("Configuration: what differs", differences));

    async function update() {
      const on = context.runs.map((run, i) => ({ run, i })).filter(({ i }) => !off.has(i));
      const all = {};
      for (const { run } of on) for (const [name, told] of Object.entries(await run.names())) all[name] ??= told;
      const first = firstCurves(context.curves, all);
      const names = new Set(first.map((curve) => curve.name));
      const wanted = [...first, ...[...chosen].filter((name) => name in all && !names.has(name))
        .map((name) => ({ name, title: name, unit: all[name].unit }))];
      await Promise.all(on.map(({ run }) => run.load(wanted.map((curve) => curve.name))));
      for (const curve of wanted) {
        if (!charts.has(curve.name)) {
          charts.set(curve.name, lineChart({ title: curve.title, unit: curve.unit, doc: `${curve.name}: ${all[curve.name].doc}.` }));
        }
        charts.get(curve.name).draw(on.map(({ run, i }) => ({
          name: run.label, colour: colour(i), ...(run.series.get(curve.name) ?? { steps: [], values: [] }),
        })));
      }
      const nodes = wanted.length ? wanted.map((c) => charts.get(c.name).node) : [missing("No metrics in the runs that are ticked.")];
      if (nodes.length !== grid.children.length || nodes.some((node, k) => node !== grid.children[k])) grid.replaceChildren(...nodes);
      list.update(all);
      const rows = wanted.map((curve) => [el("span", { class: "name", text: curve.name }),
        ...on.map(({ run }) => number(run.metrics[curve.name]?.value))]);
      finals.replaceChildren(table(["metric", ...on.map(({ run }) => `${run.label}>`)], rows));
      await showDifferences(on);
    }

    async function showDifferences(on) {
      for (const { run, i } of on) if (!configs.has(i)) configs.set(i, (await run.view("config")).config);
      const keys = [...new Set(on.flatMap(({ i }) => Object.keys(configs.get(i))))].sort();
      const differing = keys.filter((key) => new Set(on.map(({ i }) => plain(configs.get(i)[key]))).size > 1);
      const rows = differing.map((key) => [el("span", { class: "name", text: key }), ...on.map(({ i }) => plain(configs.get(i)[key]))]);
      const same = keys.length - differing.length;
      differences.replaceChildren(
        rows.length ? table(["key", ...on.map(({ run }) => run.label)], rows, { id: "differences" }) : missing(
          on.length < 2 ? "One run: give several run directories to compare." : "The configurations do not differ."),
        el("p", { class: "muted", text: `${same} of ${keys.length} keys are the same.` }));
    }
    await update();
    return { update };
  },
};
