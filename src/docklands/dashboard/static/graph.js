// The algorithm's dataflow, and where the rows are now.

import { bytes, colour, el, missing, number, section, svg, table } from "./dom.js";

const ago = (time) => {
  const s = Math.max(0, Date.now() / 1000 - time);
  return s < 90 ? `${Math.round(s)} s ago` : new Date(time * 1000).toLocaleString();
};

function arrow(id, kind) {
  return svg("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    svg("path", { class: `head ${kind}`, d: "M0 0L8 4L0 8z" }));
}

/** The boxes and arrows; `counts` of each stage are put in by `draw`. */
function picture(found) {
  const { stages, boxes, width, size, routes, back, label } = found;
  const node = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, class: "graph", role: "img",
    "aria-label": `Dataflow: ${stages.map((s) => s.name).join(", ")}`, style: { width: `${size[0]}px` } },
  svg("defs", {}, arrow("m", ""), arrow("mb", "blue")),
  routes.map((d) => svg("path", { class: "edge", d, "marker-end": "url(#m)" })));
  if (back) {
    node.append(svg("path", { class: "edge back", d: back, "marker-end": "url(#mb)" }),
      svg("text", { x: label[0], y: label[1], "text-anchor": "middle", text: "new weights" }));
  }
  const draws = [];
  const source = boxes.prompts;
  if (source) {
    const flight = svg("text", { x: source.x + width / 2, y: source.y + source.h + 16, "text-anchor": "middle" });
    node.append(svg("rect", { class: "box", x: source.x, y: source.y, width, height: source.h, rx: source.h / 2 }),
      svg("text", { class: "ink title", x: source.x + width / 2, y: source.y + 20, "text-anchor": "middle", text: "prompts" }), flight);
    draws.push((sight) => {
      flight.textContent = sight.in_flight === undefined ? "" : `${number(sight.in_flight)} groups in flight`;
    });
  }
  for (const stage of stages) {
    const at = boxes[stage.name];
    if (at === undefined) continue;
    const box = svg("rect", { class: "box", x: at.x, y: at.y, width, height: at.h, rx: 8 });
    const y = at.y + at.h - 46;
    const counts = [["ready", "var(--c1)"], ["leased", "var(--c0)"]].map(([what, tone], i) => {
      const value = svg("tspan");
      const dot = svg("tspan", { style: { fill: tone }, text: "● " });
      return { what, value, text: svg("text", { class: "ink", x: at.x + 12, y: y + 18 + 17 * i }, dot, value) };
    });
    node.append(svg("g", {}, box, svg("title", { text: `${stage.name} reads ${stage.reads.join(", ") || "nothing"}` }),
      svg("text", { class: "ink title", x: at.x + 12, y: at.y + 20, text: stage.name.slice(0, 22) }),
      svg("text", { x: at.x + 12, y: at.y + 35, text: `${stage.role} · by ${stage.by}`.slice(0, 27) }),
      stage.writes.map((column, i) => svg("text", { x: at.x + 12, y: at.y + 51 + 14 * i, text: `→ ${column}`.slice(0, 26) })),
      svg("line", { class: "rule", x1: at.x, x2: at.x + width, y1: y, y2: y }),
      counts.map(({ text }) => text)));
    draws.push((sight) => {
      const held = sight.stages[stage.name] ?? {};
      box.classList.toggle("busy", (held.leased ?? 0) > 0);
      for (const { what, value, text } of counts) {
        const n = held[what];
        value.textContent = n === undefined ? "–" : `${number(n)} ${what === "ready" ? "ready" : "in flight"}`;
        text.classList.toggle("zero", !n);
      }
    });
  }
  return { node, draw: (sight) => draws.forEach((draw) => draw(sight)) };
}

/** Ready and leased rows of a stage over the last looks, as two areas. */
function history(flow, name) {
  const width = 620, height = 30;
  const values = (what) => flow.map((sight) => sight.stages[name]?.[what] ?? 0);
  const most = Math.max(1, ...values("ready"), ...values("leased"));
  const first = flow[0].time, span = Math.max(flow.at(-1).time - first, 1e-3);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "history", preserveAspectRatio: "none", "aria-hidden": "true" });
  [["ready", 1], ["leased", 0]].forEach(([what, tone]) => {
    const ys = values(what);
    let d = `M0 ${height}`;
    flow.forEach((sight, i) => {
      const x = ((sight.time - first) / span) * width, y = height - 1 - (ys[i] / most) * (height - 3);
      d += i ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `V${y.toFixed(1)}`;
    });
    node.append(svg("path", { d: `${d}H${width}V${height}Z`, style: { fill: colour(tone), opacity: 0.5 } }));
  });
  return node;
}

export const graph = {
  title: "Dataflow",

  async mount(root, context) {
    const holder = el("div", { class: "scroll center" });
    const when = el("p", { class: "muted" });
    const key = el("div", { class: "legend" },
      el("span", {}, el("i", { style: { background: colour(1) } }), "ready: rows whose inputs are there, waiting for the stage"),
      el("span", {}, el("i", { style: { background: colour(0) } }), "in flight: rows that the stage is working on"));
    const below = el("div");
    root.append(el("div", { class: "card" }, holder, key, when), below);
    let drawn = null, shape = "";

    async function update() {
      const found = await context.run.view("graph");
      if (!found.stages.length) {
        holder.replaceChildren(missing("No graph: graph.json is missing."));
        return;
      }
      const now = JSON.stringify([found.stages, found.boxes]);
      if (now !== shape) {
        drawn = picture(found);
        shape = now;
        holder.replaceChildren(drawn.node);
      }
      const { flow, stages } = found;
      const last = flow.at(-1);
      drawn.draw(last ?? { stages: {} });
      when.textContent = last === undefined
        ? "No counts: dock.jsonl is missing (a run that an older version wrote)."
        : `Counts of ${ago(last.time)}, ${last.step ?? 0} steps done`
          + (last.bytes === undefined ? "." : `, ${bytes(last.bytes)} in the warehouses.`);
      const rows = stages.map((stage) => {
        const held = last?.stages[stage.name] ?? {};
        return [el("b", { text: stage.name }), `${stage.role} · by ${stage.by}`,
          el("span", { class: "name", text: stage.reads.join(", ") }), el("span", { class: "name", text: stage.writes.join(", ") || "weights" }),
          number(held.ready), number(held.leased), number(held.done)];
      });
      const parts = [section("Stages", table(["stage", "role", "reads", "writes", "ready>", "in flight>", "done>"], rows))];
      if (flow.length > 1) {
        const span = flow.at(-1).time - flow[0].time;
        parts.unshift(section("The last looks", el("div", { class: "card" },
          el("p", { class: "muted", text: `${flow.length} looks over ${number(span)} s; the tallest of each row is its own maximum.` }),
          el("div", { class: "histories" }, stages.map((stage) => [el("span", { text: stage.name }), history(flow, stage.name)])))));
      }
      below.replaceChildren(...parts);
    }
    await update();
    return { update };
  },
};
