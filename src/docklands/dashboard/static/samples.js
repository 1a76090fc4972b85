// Samples of a step by group: texts, rewards, and the tokens one by one.

import { el, hideTip, missing, number, section, showTip, tint } from "./dom.js";

/** How a token may be coloured: [key, label, the columns it needs, (columns, i) -> {value, paint}]. */
const LOOKS = [
  ["difference", "trainer − rollout", ["old", "rollout"], (t, i) => t.old[i] - t.rollout[i],
    (v) => tint(v < 0 ? "var(--c0)" : "var(--c4)", Math.min(1, Math.abs(v) / 0.5) * 0.75),
    "log-prob of the trainer minus that of the generator, nats: red where the trainer is surer, blue where it is less sure, full at 0.5"],
  ["reference", "policy − reference", ["rollout", "ref"], (t, i) => (t.old ?? t.rollout)[i] - t.ref[i],
    (v) => tint(v < 0 ? "var(--c0)" : "var(--c4)", Math.min(1, Math.abs(v) / 2) * 0.75),
    "log-prob of the policy minus that of the reference, nats: red where the policy is surer, full at 2"],
  ["surprise", "surprise", ["rollout"], (t, i) => -t.rollout[i], (v) => tint("var(--c1)", Math.min(1, v / 4) * 0.8),
    "−log p of the sampled token at sampling time, nats; full at 4"],
  ["advantage", "advantage", ["advantage"], (t, i) => t.advantage[i],
    (v) => tint(v < 0 ? "var(--c4)" : "var(--c2)", Math.min(1, Math.abs(v)) * 0.7), "advantage of the token; full at ±1"],
  ["mask", "mask", ["mask"], (t, i) => Number(t.mask[i]), (v) => (v ? tint("var(--c2)", 0.35) : tint("var(--c5)", 0.35)),
    "green: the policy sampled it and it is trained; grey: it came from the environment"],
  ["version", "version", ["versions"], (t, i) => t.versions[i], (v) => (v < 0 ? tint("var(--c5)", 0.3) : tint(`var(--c${v % 8})`, 0.4)),
    "version of the weights that sampled the token"],
];

const has = (tokens, look) => look[2].every((name) => tokens?.[name] !== undefined);

function chip(text, kind = "") {
  return el("span", { class: `chip ${kind}`, text });
}

/** A token as it can be seen: line ends and blanks that would vanish have signs. */
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥"));

/** At most so many tokens are drawn one by one; samples after that are plain text. */
const MOST_DRAWN = 30000;

function strip(tokens, look) {
  const node = el("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
  tokens.text.forEach((text, i) => {
    const sampled = tokens.mask === undefined || tokens.mask[i] === "1";
    const value = has(tokens, look) && (sampled || look[0] === "mask") ? look[3](tokens, i) : null;
    const span = el("span", { class: "token", "data-i": i, text: visible(text) });
    if (value !== null && Number.isFinite(value)) span.style.background = look[4](value);
    node.append(span);
  });
  if (tokens.all > tokens.text.length) node.append(el("span", { class: "muted", text: ` … ${number(tokens.all - tokens.text.length)} more` }));
  node.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) return hideTip();
    const lines = [`token ${Number(i) + 1}: ${JSON.stringify(tokens.text[i])}`];
    const figure = (name, told) => { if (tokens[name] !== undefined) lines.push(`${told} ${number(tokens[name][i])}`); };
    if (tokens.mask !== undefined && tokens.mask[i] !== "1") lines.push("not sampled by the policy, not trained");
    figure("rollout", "log p at sampling");
    figure("old", "log p of the trainer");
    if (has(tokens, LOOKS[0])) lines.push(`difference ${number(tokens.old[i] - tokens.rollout[i])}`);
    figure("ref", "log p of the reference");
    figure("advantage", "advantage");
    figure("versions", "weights of version");
    return showTip(event.clientX, event.clientY, ...lines);
  });
  node.addEventListener("pointerleave", hideTip);
  return node;
}

function sample(row, look, room) {
  const reward = row.reward === undefined ? chip("no reward") : chip(`reward ${number(row.reward)}`, row.reward > 0 ? "good" : "bad");
  const chips = [reward];
  if (row.advantage !== undefined) chips.push(chip(`advantage ${row.advantage > 0 ? "+" : ""}${number(row.advantage)}`));
  if (row.response_tokens !== undefined) chips.push(chip(`${number(row.response_tokens)} tokens`));
  if (row.finish) chips.push(chip(row.finish === "length" ? "cut at the limit" : row.finish, row.finish === "length" ? "bad" : ""));
  if (row.versions) {
    const [low, high] = row.versions;
    chips.push(chip(low === high ? `version ${low}` : `versions ${low} to ${high}`));
  }
  const drawn = look !== null && row.tokens !== undefined && room.left >= row.tokens.text.length;
  if (drawn) room.left -= row.tokens.text.length;
  const body = drawn ? strip(row.tokens, look) : el("div", { class: "text", text: row.completion || "(empty)" });
  return el("article", { class: "sample" }, el("div", {}, chips), body);
}

export const samples = {
  title: "Samples",

  async mount(root, context) {
    let step = null, key = "text", shown = null, follow = true;
    const input = el("input", { type: "number", min: 0, "aria-label": "Step", on: { change: () => go(Number(input.value)) } });
    const move = (name, text, label) => el("button", { type: "button", "aria-label": label, text, on: { click: () => go(shown?.[name]) } });
    const buttons = { first: move("first", "⇤", "First step"), previous: move("previous", "←", "Previous step"),
      next: move("next", "→", "Next step"), last: move("last", "⇥", "Last step") };
    const looks = el("div", { class: "choice", role: "radiogroup", "aria-label": "Colour of tokens" });
    const note = el("p", { class: "muted" });
    const body = el("div");
    root.append(el("div", { class: "toolbar" }, buttons.first, buttons.previous, el("label", {}, "Step ", input), buttons.next, buttons.last,
      el("span", { class: "gap" }), looks), note, body);
    const keys = (event) => {
      if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "j" && shown?.next !== null) go(shown?.next);
      if (event.key === "k" && shown?.previous !== null) go(shown?.previous);
    };
    document.addEventListener("keydown", keys);

    function go(wanted) {
      if (wanted === undefined || wanted === null || !Number.isFinite(wanted)) return;
      step = Math.max(0, Math.round(wanted));
      follow = wanted === shown?.last;
      load().catch(context.failed);
    }

    function draw() {
      const rows = shown.groups.flatMap((group) => group.rows);
      const usable = LOOKS.filter((look) => rows.some((row) => has(row.tokens, look)));
      const look = usable.find(([name]) => name === key) ?? null;
      const current = look === null ? "text" : key;
      looks.replaceChildren(...[["text", "plain text"], ...usable].map(([name, label]) => el("label", {},
        el("input", { type: "radio", name: "look", value: name, checked: name === current,
          on: { change: () => { key = name; draw(); looks.querySelector("input:checked").focus(); } } }), el("span", { text: label }))));
      const about = [];
      if (look !== null) about.push(`${look[1]}: ${look[5]}.`);
      if (rows.length && !rows.some((row) => row.tokens)) about.push("No tokens were written (obs.tokens_per_sample: 0, or an older version).");
      else if (rows.length && !rows.some((row) => row.tokens?.old)) {
        about.push("No difference to the trainer: this algorithm does not compute the trainer's log-probs before the update.");
      }
      if (shown.cut) about.push("There are more samples than are shown.");
      const room = { left: MOST_DRAWN };
      note.textContent = about.join(" ");
      body.replaceChildren(...shown.groups.map((group) => {
        const scores = group.rows.map((row) => row.reward).filter((value) => value !== undefined);
        const mean = scores.length ? `mean reward ${number(scores.reduce((a, b) => a + b, 0) / scores.length)} of ${scores.length}` : "";
        return el("section", { class: "card group" },
          el("div", { class: "prompt" }, el("span", { class: "text", text: group.prompt }),
            el("span", { class: "muted", text: `group ${group.id ?? "?"} · ${mean}` })),
          group.rows.map((row) => sample(row, look, room)));
      }));
    }

    async function load() {
      const found = await context.run.view("samples", follow || step === null ? [] : [["step", step]]);
      if (found.step === null) {
        body.replaceChildren(missing("No samples: samples/ is empty (obs.samples_per_step: 0, or no step has finished)."));
        return;
      }
      const same = JSON.stringify(found) === JSON.stringify(shown);
      shown = found;
      step = found.step;
      input.value = step;
      input.min = found.first;
      input.max = found.last;
      for (const [name, button] of Object.entries(buttons)) button.disabled = found[name] === null || found[name] === step;
      if (!same) draw();
    }
    await load();
    return { update: load, close: () => document.removeEventListener("keydown", keys) };
  },
};
