// What ran when: a row per role, rank and lane. Drag or arrow keys move, wheel or + and − zoom; who waited for whom.

import { el, hideTip, missing, seconds, section, showTip, table, ticks } from "./dom.js";

const ROW = 24, HEAD = 24, LEFT = 132, RIGHT = 8;

/** Where spans and waits are painted, for the part of time [from, to]. */
class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.rows = [];
    this.names = [];
  }

  /** New spans and waits. */
  take(found) {
    this.found = found;
    const keys = new Map();
    for (const span of found.spans) keys.set(`${span.role}\u0000${span.rank}\u0000${span.lane}`, [span.role, span.rank, span.lane]);
    const order = [...new Set(found.spans.map((span) => span.role))];
    this.rows = [...keys.values()].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]) || a[1] - b[1] || a[2] - b[2]);
    this.index = new Map(this.rows.map((row, i) => [row.join("\u0000"), i]));
    for (const { name } of found.spans) if (name !== "step" && !this.names.includes(name)) this.names.push(name);
    this.canvas.style.height = `${this.rows.length * ROW + HEAD + 4}px`;
  }

  x(time) { return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT); }

  time(x) { return this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * (this.to - this.from); }

  rowOf(thing) { return this.index.get(`${thing.role}\u0000${thing.rank}\u0000${thing.lane ?? 0}`); }

  paint(from, to) {
    Object.assign(this, { from, to });
    const style = getComputedStyle(document.documentElement);
    const tone = (name) => style.getPropertyValue(name).trim();
    const ratio = devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
    this.width = box.width;
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.grid(c, tone);
    c.save();
    c.beginPath();
    c.rect(LEFT, HEAD, this.width - LEFT - RIGHT, box.height);
    c.clip();
    for (const wait of this.found.waits) this.wait(c, wait, tone);
    for (const span of this.found.spans) this.span(c, span, tone);
    c.restore();
  }

  grid(c, tone) {
    const height = this.rows.length * ROW + HEAD;
    c.textAlign = "center";
    for (const tick of ticks(0, this.to - this.from, 8)) {
      const x = this.x(this.from + tick);
      if (x > this.width - RIGHT) continue;
      c.fillStyle = tone("--line");
      c.fillRect(Math.round(x), HEAD - 4, 1, height - HEAD + 4);
      c.fillStyle = tone("--muted");
      c.fillText(`+${seconds(tick)}`, Math.min(x, this.width - 30), 10);
    }
    c.textAlign = "right";
    this.rows.forEach(([role, rank, lane], i) => {
      if (lane === 0) {
        c.fillStyle = tone("--line");
        c.fillRect(0, HEAD + i * ROW, this.width, 1);
        c.fillStyle = tone("--ink");
        c.fillText(`${role.slice(0, 17)}${rank ? ` ${rank}` : ""}`, LEFT - 12, HEAD + i * ROW + ROW / 2);
      }
    });
  }

  wait(c, wait, tone) {
    const row = this.rowOf(wait);
    if (row === undefined || wait.cause === "rows") return;
    const [a, b] = [this.x(wait.start), this.x(wait.end)], y = HEAD + row * ROW + ROW / 2;
    if (b - a < 2) return;
    c.strokeStyle = tone(wait.cause === "input" ? "--c1" : "--c5");
    c.setLineDash([3, 3]);
    c.lineWidth = 1.5;
    c.beginPath();
    c.moveTo(a, y);
    c.lineTo(b, y);
    c.stroke();
    c.setLineDash([]);
  }

  span(c, span, tone) {
    const a = this.x(span.start), b = this.x(span.start + span.duration);
    if (b < LEFT || a > this.width) return;
    const inset = Math.min(span.depth * 4, 12), row = this.rowOf(span);
    const y = HEAD + row * ROW + 3 + inset / 2, width = Math.max(1.5, b - a), height = ROW - 6 - inset;
    const tint = this.names.indexOf(span.name);
    c.globalAlpha = tint < 8 ? 1 : 0.55;
    c.fillStyle = span.name === "step" ? tone(span.step % 2 ? "--line" : "--soft") : tone(`--c${tint % 8}`);
    c.beginPath();
    c.roundRect(a, y, width, height, Math.min(3, width / 2));
    c.fill();
    c.globalAlpha = 1;
    if (span === this.chosen) {
      c.strokeStyle = tone("--ink");
      c.lineWidth = 2;
      c.stroke();
    }
    const left = Math.max(a, LEFT) + 5, text = span.name.replace(/^stage\//, "");
    if (span.depth < 2 && Math.min(b, this.width) - left > 7 * text.length + 4) {
      c.fillStyle = span.name === "step" ? tone("--ink") : "#fff";
      c.textAlign = "left";
      c.fillText(span.name === "step" && span.step !== null ? `step ${span.step + 1}` : text, left, y + height / 2 + 0.5);
    }
  }

  /** The innermost span, else the wait, at a place of the canvas. */
  at(x, y) {
    const row = Math.floor((y - HEAD) / ROW), time = this.time(x), slack = ((this.to - this.from) / this.width) * 2;
    const here = (t) => this.rowOf(t) === row;
    const spans = this.found.spans.filter((s) => here(s) && s.start - slack <= time && time <= s.start + s.duration + slack);
    if (spans.length) return { span: spans.reduce((a, b) => (b.depth >= a.depth ? b : a)) };
    return { wait: this.found.waits.find((w) => here(w) && w.start <= time && time <= w.end) };
  }
}

const because = (wait) => ({
  input: `waited for its input: ${wait.by} was at work`, device: `waited for its device: ${wait.by} held it`,
  rows: "had no rows: nothing was admitted or handed over",
})[wait.cause];

function told(span) {
  const more = Object.entries(span.attributes).map(([name, value]) => `${name} ${value}`);
  const where = `${span.role} ${span.rank}${span.step === null ? "" : `, step ${span.step + 1}`}`;
  return [`${span.name}: ${seconds(span.duration)}`, where, ...more];
}

/** Per role: how long it worked and whom it waited for. */
function summary(found) {
  const rows = new Map();
  const row = (role) => { if (!rows.has(role)) rows.set(role, { busy: 0, waits: new Map() }); return rows.get(role); };
  for (const span of found.spans) if (/^(stage|update)\//.test(span.name)) row(span.role).busy += span.duration;
  for (const wait of found.waits) {
    const name = wait.cause === "rows" ? "rows" : `${wait.by}${wait.cause === "device" ? " (its device)" : ""}`;
    const { waits } = row(wait.role);
    waits.set(name, (waits.get(name) ?? 0) + wait.end - wait.start);
  }
  return [...rows].map(([role, { busy, waits }]) => [el("b", { text: role }), seconds(busy),
    seconds([...waits.values()].reduce((a, b) => a + b, 0)),
    [...waits].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name, s]) => `${name.replace(/^stage\//, "")} ${seconds(s)}`).join(" · ") || "nobody"]);
}

export const timeline = {
  title: "Timeline",

  async mount(root, context) {
    const canvas = el("canvas", { class: "timeline", tabindex: 0, role: "img", "aria-label": "Timeline. Arrow keys move, plus and minus zoom, 0 shows all that was read." });
    const painter = new Painter(canvas);
    const input = el("input", { type: "number", min: 1, "aria-label": "Step", on: { change: () => step(Number(input.value)) } });
    const live = el("input", { type: "checkbox", checked: true, on: { change: () => live.checked && fetchNow([]) } });
    const button = (text, label, call) => el("button", { type: "button", text, "aria-label": label, on: { click: call } });
    const legend = el("div", { class: "legend" }), note = el("p", { class: "muted" }), who = el("div");
    const holder = el("div", { class: "card" }, canvas, legend, note);
    root.append(el("div", { class: "toolbar" }, button("←", "Earlier", () => pan(-0.4)), el("label", {}, "Step ", input),
      button("→", "Later", () => pan(0.4)), button("−", "Zoom out", () => zoom(1.6)), button("+", "Zoom in", () => zoom(1 / 1.6)),
      button("all", "Whole window", () => view(found?.start, found?.end)), el("label", {}, live, " follow the run")), holder, section("Who waits for whom", who));
    let found = null, timer = null, asked = 0;

    async function fetchNow(parameters) {
      const mine = asked += 1;
      const answer = await context.run.view("timeline", parameters);
      if (mine !== asked) return;
      if (answer.extent === null) {
        holder.replaceChildren(missing("No spans: spans.jsonl is missing or empty."));
        return;
      }
      found = answer;
      painter.take(found);
      view(found.start, found.end, false);
      legend.replaceChildren(...painter.names.slice(0, 24).map((name, i) =>
        el("span", {}, el("i", { style: { background: `var(--c${i % 8})`, opacity: i < 8 ? 1 : 0.55 } }), name.replace(/^stage\//, ""))),
      el("span", {}, el("i", { class: "dash input" }), "waits for its input"), el("span", {}, el("i", { class: "dash device" }), "waits for its device"));
      note.textContent = [found.hidden ? `${found.hidden} short spans are left out: zoom in.` : "",
        found.cut ? "The window is too long to be read whole: zoom in for its end." : "",
        "A span is written when it ends."].join(" ");
      who.replaceChildren(found.hidden ? el("p", { class: "muted", text: "Zoom in: waits are found once every span of the window is shown." })
        : table(["role", "at work>", "waiting>", "for whom"], summary(found), { id: "waits" }));
    }

    /** Show [from, to]; what was not read is read a moment later. */
    function view(from, to, fetch = true) {
      if (found === null || !(to > from)) return;
      const [low, high] = found.extent, least = 1e-4;
      const length = Math.min(Math.max(to - from, least), Math.max(high - low, least) * 1.2);
      from = Math.min(Math.max(from, low - length / 2), high - length / 2);
      painter.paint(from, from + length);
      const middle = from + length / 2;
      const inside = painter.found.spans.find((s) => s.name === "step" && s.start <= middle && middle <= s.start + s.duration);
      if (inside && document.activeElement !== input) input.value = inside.step + 1;
      clearTimeout(timer);
      const lacking = from < found.start - 1e-6 || from + length > found.end + 1e-6 || (found.hidden && length < 0.7 * (found.end - found.start));
      if (fetch && lacking && !(from + length > high && found.end >= high && from >= found.start)) {
        timer = setTimeout(() => fetchNow([["from", from], ["to", from + length]]).catch(context.failed), 150);
      }
    }
    const stay = () => { live.checked = false; };
    function pan(share) { stay(); const d = (painter.to - painter.from) * share; view(painter.from + d, painter.to + d); }
    function zoom(factor, around = (painter.from + painter.to) / 2) {
      stay();
      view(around - (around - painter.from) * factor, around + (painter.to - around) * factor);
    }
    function step(n) { stay(); fetchNow([["step", n]]).catch(context.failed); }

    let held = null;
    canvas.addEventListener("pointerdown", (event) => { held = event.clientX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { held = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (found === null) return;
      if (held !== null) {
        const d = painter.time(held) - painter.time(event.clientX);
        held = event.clientX;
        if (d) { stay(); view(painter.from + d, painter.to + d); }
        return hideTip();
      }
      const box = canvas.getBoundingClientRect(), { span, wait } = painter.at(event.clientX - box.left, event.clientY - box.top);
      if (span) return showTip(event.clientX, event.clientY, ...told(span));
      if (wait) return showTip(event.clientX, event.clientY, `${wait.role} ${because(wait)}`, seconds(wait.end - wait.start));
      return hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("wheel", (event) => {
      if (found === null || (!event.ctrlKey && document.activeElement !== canvas)) return; // the page scrolls otherwise
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, painter.time(event.clientX - canvas.getBoundingClientRect().left));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const calls = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6),
        "-": () => zoom(1.6), "0": () => view(found?.start, found?.end) };
      if (calls[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); calls[event.key](); }
    });
    const resized = new ResizeObserver(() => { if (found !== null) painter.paint(painter.from, painter.to); });
    resized.observe(holder);
    const recoloured = new MutationObserver(() => { if (found !== null) painter.paint(painter.from, painter.to); });
    recoloured.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    await fetchNow([]);
    return {
      update: () => (live.checked ? fetchNow([]) : null),
      close() { clearTimeout(timer); resized.disconnect(); recoloured.disconnect(); },
    };
  },
};
