// What the server knows, asked for as it is needed. Series are kept and only their new points are fetched.

export class Refused extends Error {}

export async function ask(path, parameters = []) {
  const query = new URLSearchParams(parameters).toString();
  const stop = AbortSignal.timeout(30000);
  const response = await fetch(query ? `${path}?${query}` : path, { signal: stop, cache: "no-store" });
  const found = await response.json();
  if (!response.ok) throw new Refused(found.error ?? response.statusText);
  return found;
}

const MOST_NAMES = 50;

/** One run, by its number on the command line. */
export class Run {
  constructor(index, state) {
    this.index = index;
    this.state = state;
    this.series = new Map();
    this.epoch = null;
    this.metrics = {};
    this.metricsVersion = null;
  }

  view(name, parameters) {
    return ask(`/api/runs/${this.index}/${name}`, parameters);
  }

  /** Names with their meaning and last value, when the run has moved on since they were last read. */
  async names() {
    if (this.metricsVersion !== this.state.version) {
      const version = this.state.version;
      this.metrics = await this.view("metrics");
      this.metricsVersion = version;
    }
    return this.metrics;
  }

  /** Bring these metrics up to date: Map name -> {steps, values, per}. */
  async load(names) {
    for (let i = 0; i < names.length; i += MOST_NAMES) await this.loadSome(names.slice(i, i + MOST_NAMES));
    return this.series;
  }

  /** One request after another: two at once would add the same points twice. */
  loadSome(names) {
    this.queue = (this.queue ?? Promise.resolve()).catch(() => {}).then(() => this.loadNow(names));
    return this.queue;
  }

  async loadNow(names) {
    const parameters = this.epoch === null ? [] : [["epoch", this.epoch]];
    for (const name of names) {
      const known = this.series.get(name);
      parameters.push(["name", name], ["after", known?.steps.at(-1) ?? -1]);
    }
    const found = await this.view("series", parameters);
    if (found.whole) this.series.clear();
    this.epoch = found.epoch;
    for (const [name, points] of Object.entries(found.series)) {
      const known = this.series.get(name);
      if (known === undefined) this.series.set(name, points);
      else {
        known.steps.push(...points.steps);
        known.values.push(...points.values);
      }
    }
  }
}
