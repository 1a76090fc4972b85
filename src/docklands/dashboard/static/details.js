// What the run was asked for, what it runs on, and the ends of its logs.

import { el, missing, section, table } from "./dom.js";

export const details = {
  title: "Config & logs",

  async mount(root, context) {
    const parts = el("div");
    root.append(parts);

    async function update() {
      const [{ config, env }, logs] = await Promise.all([context.run.view("config"), context.run.view("logs")]);
      const opened = new Set([...parts.querySelectorAll("details[open]")].map((node) => node.dataset.name));
      const fold = (name, text) => el("details", { class: "card", "data-name": name, open: opened.has(name) },
        el("summary", { text: name }), el("pre", { text: text || "(empty)" }));
      const rows = (found) => Object.entries(found).map(([key, value]) => [el("span", { class: "name", text: key }), String(value)]);
      const names = Object.keys(logs);
      parts.replaceChildren(
        section("Logs, their ends", names.length ? names.map((name) => fold(name, logs[name])) : missing("No logs.")),
        section("Configuration", Object.keys(config).length ? table(["key", "value"], rows(config)) : missing("No configuration: config.yaml is missing or torn.")),
        section("Machine", Object.keys(env).length ? table(["", "value"], rows(env)) : missing("env.json is missing.")));
    }
    await update();
    return { update };
  },
};
