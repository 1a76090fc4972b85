// Memory and resharding: what the machine holds, what moves weights between training and generation, how long it takes.

import { lineChart, lineOf } from "./charts.js";
import { bytes, colour, el, missing, number, seconds, section, table } from "./dom.js";

const WANTED = /^(memory\/|reshard\/|timing_s\/(reshard|publish|swap)|dock\/bytes$)|_offloaded_mib$|_saved_mib$|kv_blocks_peak$/;

const rank = (name) => ["memory", "reshard", "timing_s"].findIndex((head) => name.startsWith(head)) + (/^(memory|reshard|timing_s)/.test(name) ? 0 : 9);

export const memory = {
  title: "Memory",

  async mount(root, context) {
    const grid = el("div", { class: "grid" }), below = el("div"), charts = new Map();
    const tiers = lineChart({ title: "Bytes by tier", unit: "over the last steps", figure: bytes, x: (s) => `${seconds(s)} after the first`,
      doc: "What the swaps between device, host and disk held, from the spans memory/*.",
      ticksOf: (low, high) => [low, (low + high) / 2, high].map((s) => [s, seconds(s)]) });
    root.append(grid, below);

    async function update() {
      const { run } = context;
      const metrics = await run.names(), names = Object.keys(metrics).filter((name) => WANTED.test(name)).sort((a, b) => rank(a) - rank(b));
      const [found] = await Promise.all([run.view("memory"), run.load(names)]);
      names.forEach((name, i) => {
        if (!charts.has(name)) charts.set(name, lineChart({ title: name, unit: metrics[name].unit, doc: `${metrics[name].doc}.`,
          ...(metrics[name].unit === "B" ? { figure: bytes } : {}) }));
        charts.get(name).draw([lineOf(run, name, i)]);
      });
      const cards = names.map((name) => charts.get(name).node);
      if (found.tiers.length > 1) {
        const zero = found.tiers[0][0], kinds = [...new Set(found.tiers.flatMap(([, held]) => Object.keys(held)))];
        tiers.draw(kinds.map((kind, i) => {
          const points = found.tiers.filter(([, held]) => held[kind] !== undefined);
          return { name: kind.replace(/_bytes$/, ""), colour: colour(i), plain: true, steps: points.map(([t]) => t - zero), values: points.map(([, held]) => held[kind]) };
        }));
        cards.unshift(tiers.node);
      }
      const nodes = cards.length ? cards : [missing("No figures of memory or resharding yet.")];
      if (nodes.length !== grid.children.length || nodes.some((node, i) => node !== grid.children[i])) grid.replaceChildren(...nodes);
      below.replaceChildren(...moves(found.moves));
    }
    await update();
    return { update };
  },
};

/** The work that moved weights, by name, and the latest of it. */
function moves(rows) {
  if (!rows.length) return [];
  const by = Map.groupBy ? Map.groupBy(rows, (row) => row.name) : rows.reduce((map, row) =>
    map.set(row.name, [...(map.get(row.name) ?? []), row]), new Map());
  const totals = [...by].map(([name, all]) => {
    const took = all.map((row) => row.duration), sum = took.reduce((a, b) => a + b, 0);
    return [el("b", { text: name }), number(all.length), seconds(sum / all.length), seconds(Math.max(...took)), seconds(sum)];
  });
  const last = rows.slice(-12).reverse().map((row) => [row.step === null ? "" : String(row.step + 1), row.name, `${row.role} ${row.rank}`, seconds(row.duration),
    Object.entries(row.attributes).map(([k, v]) => `${k} ${/_bytes$/.test(k) ? bytes(v) : v}`).join(" · ")]);
  return [section("What moves weights, over the last steps", table(["work>", "times>", "mean>", "longest>", "in all>"].map((n, i) => (i ? n : "work")), totals)),
    section("The latest", table(["step", "work", "role", "time>", "details"], last))];
}
