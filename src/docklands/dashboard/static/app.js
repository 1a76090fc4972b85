// The frame: which run, which view, and the regular look at whether there is something new.

import { ask, Run } from "./data.js";
import { compare } from "./compare.js";
import { details } from "./details.js";
import { el, hideTip } from "./dom.js";
import { graph } from "./graph.js";
import { memory } from "./memory.js";
import { overview } from "./overview.js";
import { samples } from "./samples.js";
import { timeline } from "./timeline.js";

const VIEWS = { overview, dataflow: graph, timeline, samples, memory, compare, details };
const EVERY_MS = 2000;
const NAMES = { running: "running", done: "done", stopped: "stopped" };
const at = (id) => document.getElementById(id);

let shown = null, turn = 0, seen = null, busy = false;
const context = { runs: [], run: null, curves: [], failed };

function failed(error) {
  const notice = at("notice");
  notice.textContent = error.name === "TypeError" || error.name === "TimeoutError"
    ? "The dashboard's server does not answer. Start `docklands dash` again; this page goes on by itself." : String(error.message ?? error);
  notice.hidden = false;
}

/** "#/view/run" -> [view, run]. */
function wanted() {
  const [, view, run] = location.hash.match(/^#\/(\w+)(?:\/(\d+))?$/) ?? [];
  return [view in VIEWS ? view : "overview", Math.min(Number(run ?? 0), context.runs.length - 1)];
}

const link = (view, run) => `#/${view}/${run}`;

async function show() {
  const [name, index] = wanted(), mine = turn += 1;
  context.run = context.runs[index];
  hideTip();
  shown?.close?.();
  shown = null;
  head(name, index);
  const root = el("div", { class: `view ${name}` });
  at("view").replaceChildren(root);
  document.title = `${context.run.label} · ${VIEWS[name].title} · Docklands`;
  seen = version();
  try {
    const made = await VIEWS[name].mount(root, context);
    if (mine === turn) shown = made; else made.close?.();
    at("view").dataset.ready = name;
  } catch (error) {
    failed(error);
  }
}

function head(name, index) {
  at("tabs").replaceChildren(...Object.entries(VIEWS).map(([key, view]) =>
    el("a", { href: link(key, index), "aria-current": key === name ? "page" : null, text: view.title })));
  const select = at("run");
  const options = context.runs.map((run, i) => el("option", { value: i, text: run.label }));
  if (options.map((o) => o.text).join("\n") !== [...select.options].map((o) => o.text).join("\n")) select.replaceChildren(...options);
  select.value = String(index);
  select.disabled = context.runs.length < 2;
  facts();
}

function facts() {
  const { state } = context.run;
  const badge = at("badge");
  const text = state.unread_bytes > 0 ? "reading" : state.state === "running" ? "running" : `${NAMES[state.state]}${state.step ? ` after step ${state.step}` : " before the first step"}`;
  if (badge.textContent !== text) badge.textContent = text;
  badge.className = state.unread_bytes > 0 ? "badge" : `badge ${state.state}`;
  const more = [state.algorithm, state.model, state.data, state.unread_bytes > 0 ? `reading, ${Math.ceil(state.unread_bytes / 2 ** 20)} MiB left` : "",
    state.stuck ? `watchdog: ${state.stuck}` : ""];
  at("facts").textContent = more.filter(Boolean).join(" · ");
}

const version = () => context.runs.map((run) => run.state.version).join(" ");

async function poll() {
  if (busy || document.hidden) return;
  busy = true;
  try {
    await look();
    at("notice").hidden = true;
    facts();
    if (version() !== seen && shown !== null) {
      seen = version();
      await shown.update();
    }
  } catch (error) {
    failed(error);
  } finally {
    busy = false;
  }
}

async function look() {
  const { runs, curves } = await ask("/api/state");
  context.curves = curves;
  const names = runs.map((state) => state.name);
  runs.forEach((state, i) => {
    context.runs[i] ??= new Run(i, state);
    context.runs[i].state = state;
    const twice = names.filter((name) => name === state.name).length > 1;
    context.runs[i].label = twice ? state.folder.split("/").slice(-2).join("/") : state.name;
  });
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
}

async function begin() {
  try { dress(localStorage.getItem("docklands.theme")); } catch { /* a browser without storage */ }
  at("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    dress(dark ? "light" : "dark");
    try { localStorage.setItem("docklands.theme", dark ? "light" : "dark"); } catch { /* as above */ }
  });
  at("run").addEventListener("change", (event) => { location.hash = link(wanted()[0], Number(event.target.value)); });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); at("view").focus(); });
  await open();
  again();
  document.addEventListener("visibilitychange", poll);
}

/** Look again soon; at once while a long file is still being read. */
function again() {
  const reading = context.runs.some((run) => run.state.unread_bytes > 0);
  setTimeout(async () => { await (context.runs.length ? poll() : open()); again(); }, reading ? 100 : EVERY_MS);
}

/** The first look; once more until the server answers. */
async function open() {
  try {
    await look();
    at("notice").hidden = true;
    addEventListener("hashchange", show);
    await show();
  } catch (error) {
    failed(error);
  }
}

begin();
