// Draws the parts of the mesh as cards in three columns, and the lines between them.

import { html, setText } from "../dom.js";
import { MeshEdges } from "./mesh_edges.js";
import { count, percent } from "../numbers.js";
import { levelOf } from "./part_states.js";

const COLUMNS = [["gateway"], ["tokenizer", "output_processor", "coordinator", "encoder"], ["engine"]];
const MANY_ENGINES = 6;
const BACK_MILLISECONDS = 4000;
const ROLES = { both: "prefill + decode", prefill: "prefill", decode: "decode" };

/** Say what the coordinator compares of an engine: seconds, or a score. */
const placementText = ({ expected_seconds: seconds, score }) =>
  seconds === undefined ? `score ${count(score)}` : `${seconds.toFixed(2)} s`;

/** Say how that comes about. */
const placementTitle = ({ expected_seconds: seconds, uncached_tokens: tokens, uncached_tokens_per_second: rate,
  seats, waiting, running, score }) => (seconds === undefined
  ? `Placement: ${waiting} waiting * 4 + ${running} running = ${score}`
  : `Placement: ${seconds.toFixed(3)} s expected for ${count(tokens)} uncached prompt tokens at ${
    count(Math.round(rate))}/s and ${waiting + running} of ${seats} seats`);

const stateText = (part) => {
  if (part.state !== "lost" || part.lost_seconds === undefined) return part.state;
  return `lost for ${Math.max(1, Math.round(part.lost_seconds))} s`;
};

/** Shows one part. */
class Card {
  constructor(kind, name) {
    this.state = html("span", { class: "part-state" });
    this.name = html("b", {}, name);
    this.root = html("li", { class: `part ${kind}` }, html("span", { class: "part-head" }, this.name, this.state));
    this.level = null;
    if (kind === "engine") this.addLoad();
  }

  addLoad() {
    this.role = html("span", { class: "role" });
    this.load = html("span", { class: "load" });
    this.placement = html("span", { class: "placement" });
    this.fill = html("i");
    this.meter = html("span", { class: "meter", role: "meter", "aria-label": "KV blocks in use",
      "aria-valuemin": 0, "aria-valuemax": 100 }, this.fill);
    this.usage = html("span", { class: "usage" });
    this.root.append(html("span", { class: "part-body" }, this.role, this.load),
      html("span", { class: "part-body kv" }, html("span", {}, "KV"), this.meter, this.usage,
        this.placement));
  }

  /** `label`: the name to show. */
  show(part, label = part.name) {
    const level = levelOf(part.state);
    setText(this.name, label);
    if (this.level === "bad" && level === "ok") this.flash();
    if (level !== this.level) {
      this.root.classList.remove("ok", "warn", "bad");
      this.root.classList.add(level);
      this.level = level;
    }
    setText(this.state, stateText(part));
    if (this.meter) this.showLoad(part);
  }

  showLoad(part) {
    const known = part.kv_usage !== undefined;
    setText(this.role, known ? ROLES[part.role] ?? part.role : "");
    setText(this.load, known ? `${count(part.running)} running · ${count(part.waiting)} waiting` : "no report");
    setText(this.placement, known ? placementText(part.placement) : "");
    this.placement.title = known ? placementTitle(part.placement) : "";
    setText(this.usage, known ? percent(part.kv_usage) : "–");
    this.fill.style.width = `${known ? 100 * part.kv_usage : 0}%`;
    this.meter.setAttribute("aria-valuenow", known ? Math.round(100 * part.kv_usage) : 0);
    this.root.classList.toggle("busy", known && part.running > 0);
  }

  /** Show for a moment that the part has come back. */
  flash() {
    this.root.classList.add("back");
    setTimeout(() => this.root.classList.remove("back"), BACK_MILLISECONDS);
  }
}

export class MeshMap {
  constructor(root) {
    this.cards = new Map(); // by name
    this.columns = COLUMNS.map(() => html("ul", { class: "map-column" }));
    this.edges = new MeshEdges(root);
    root.append(this.edges.root, ...this.columns);
    this.root = root;
    this.mesh = null;
    new ResizeObserver(() => this.draw()).observe(root);
  }

  show(mesh) {
    const parts = [...mesh.parts, ...mesh.engines.map((engine) => ({ kind: "engine", ...engine }))];
    this.root.classList.toggle("dense", mesh.engines.length > MANY_ENGINES);
    this.arrange(parts);
    for (const part of parts) {
      const isOnly = parts.filter(({ kind }) => kind === part.kind).length === 1;
      this.cards.get(part.name).show(part, isOnly && part.kind !== "engine" ? part.name.replace(/ \d+$/, "") : part.name);
    }
    this.mesh = { ...mesh, all: parts };
    this.draw();
  }

  showGateway(state) {
    this.cards.get("gateway")?.show({ name: "gateway", state });
  }

  /** Put a card for each part into its column, in order, and drop those of parts that are gone. */
  arrange(parts) {
    COLUMNS.forEach((kinds, index) => {
      const cards = kinds.flatMap((kind) => parts.filter((part) => part.kind === kind)).map((part) => this.card(part));
      const column = this.columns[index];
      const same = cards.length === column.children.length && cards.every((card, at) => column.children[at] === card);
      if (!same) column.replaceChildren(...cards);
    });
    const names = new Set(parts.map((part) => part.name));
    for (const name of this.cards.keys()) if (!names.has(name)) this.cards.delete(name);
  }

  card({ kind, name }) {
    if (!this.cards.has(name)) this.cards.set(name, new Card(kind, name));
    return this.cards.get(name).root;
  }

  draw() {
    if (this.mesh) this.edges.draw(this.mesh, (name) => this.cards.get(name)?.root);
  }
}
