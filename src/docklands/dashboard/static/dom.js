// Small helpers: elements, figures for people, the tooltip. Text of a run is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [name, call] of Object.entries(value)) node.addEventListener(name, call);
    else if (key === "style") for (const [name, text] of Object.entries(value)) node.style.setProperty(name, text);
    else if (key === "text") node.textContent = value;
    else if (key in { value: 1, checked: 1, disabled: 1, open: 1 }) node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** A figure with three to four significant digits. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 1e-3) return `${number(value * 1e6)} µs`;
  if (size < 1) return `${number(value * 1e3)} ms`;
  if (size < 120) return `${number(value)} s`;
  if (size < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${number(value)} ${units[at]}`;
}

export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
export const colour = (index) => `var(--c${index % 8})`;
/** A colour mixed into nothing: share 0..1. */
export const tint = (name, share) => `color-mix(in srgb, ${name} ${Math.round(100 * share)}%, transparent)`;

/** Round numbers that span [low, high], about `count` of them; whole ones for `whole`. */
export function ticks(low, high, count = 4, whole = false) {
  if (!(high > low)) {
    const pad = Math.abs(low) * 0.1 || 0.5;
    [low, high] = [low - pad, high + pad];
  }
  const raw = whole ? Math.max(1, (high - low) / count) : (high - low) / count;
  const scale = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((m) => m * scale).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i += 1) found.push(i * step);
  return found;
}

/** A tick's figure, with as many digits as tell it from the next one. */
export function tickText(value, step) {
  if (value === 0 || Math.abs(value) >= 1e6 || step < 1e-4) return number(value);
  const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const fine = Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 ? digits + 1 : digits;
  return value.toLocaleString("en-US", { minimumFractionDigits: fine, maximumFractionDigits: fine });
}

// --- the tooltip ---

const tip = () => document.getElementById("tip");

/** Show lines of text beside a point of the window. */
export function showTip(x, y, ...lines) {
  const box = tip();
  box.replaceChildren(...lines.map((line) => (typeof line === "string" ? el("div", { text: line }) : line)));
  box.hidden = false;
  const width = box.offsetWidth, height = box.offsetHeight;
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y - height - 12 < 8 ? y + 18 : y - height - 12}px`;
}

export const hideTip = () => { tip().hidden = true; };

export const missing = (text) => el("p", { class: "card missing", text });

export function section(title, ...children) {
  return el("section", {}, el("h2", { text: title }), ...children);
}

export function table(names, rows, attributes = {}) {
  const head = el("tr", {}, names.map((name) =>
    el("th", { scope: "col", class: name.endsWith(">") ? "n" : null, text: name.replace(/>$/, "") })));
  const body = rows.map((cells) => el("tr", {}, cells.map((cell, i) => {
    const kind = names[i].endsWith(">") ? "n" : null;
    return cell instanceof Node ? el("td", { class: kind }, cell) : el("td", { class: kind, text: cell ?? "" });
  })));
  return el("div", { class: "scroll" }, el("table", attributes, el("thead", {}, head), el("tbody", {}, body)));
}
