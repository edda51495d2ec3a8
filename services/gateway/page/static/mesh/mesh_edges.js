// Draws the lines between parts: requests, control, and KV blocks from engine to engine.

import { svg } from "../dom.js";
import { isBad } from "./part_states.js";

const HOT_MILLISECONDS = 2500;
const ARC = 0.12; // pixels by which the line of a KV link bends to the right, for each pixel of its height
const MIN_ARC = 18;
const MAX_ARC = 42;

const across = (from, to) => {
  const bend = Math.max(18, (to.x - from.x) / 2);
  return `M${from.x} ${from.y}C${from.x + bend} ${from.y} ${to.x - bend} ${to.y} ${to.x} ${to.y}`;
};

const around = (from, to) => {
  const bend = Math.min(MIN_ARC + ARC * Math.abs(to.y - from.y), MAX_ARC);
  const start = from.y + (to.y > from.y ? 6 : -6); // next to where requests of the other direction arrive
  return `M${from.x} ${start}C${from.x + bend} ${start} ${to.x + bend} ${to.y} ${to.x + 2} ${to.y}`;
};

export class MeshEdges {
  constructor(map) {
    this.map = map;
    this.links = new Map(); // pair of engines to the number of prompts, and when it last grew
    const tip = svg("path", { d: "M0 0L7 3.500L0 7z", class: "tip" });
    this.tips = svg("defs", {}, svg("marker", { id: "tip", viewBox: "0 0 7 7", refX: 6, refY: 3.5, markerWidth: 9,
      markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, tip));
    this.root = svg("svg", { class: "edges", "aria-hidden": "true" }, this.tips);
  }

  /** Draw all lines. `nodeOf`: returns the card of a part by its name. */
  draw(mesh, nodeOf) {
    const { offsetWidth: width, scrollHeight: height } = this.map;
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.root.setAttribute("width", width);
    this.root.setAttribute("height", height);
    const box = (part) => {
      const node = nodeOf(part.name);
      return { left: node.offsetLeft, right: node.offsetLeft + node.offsetWidth,
        y: node.offsetTop + node.offsetHeight / 2 };
    };
    this.root.replaceChildren(this.tips, ...this.roads(mesh, box), ...this.kvLinks(mesh, box));
  }

  /** Return the lines between columns. */
  roads(mesh, box) {
    const of = (kind) => mesh.all.filter((part) => part.kind === kind);
    const line = (from, to, kind) => {
      const [start, end] = [box(from), box(to)];
      const state = isBad(from.state) || isBad(to.state) ? " cut" : "";
      const flow = to.running > 0 && kind === "road" ? " flow" : "";
      return svg("path", { class: kind + state + flow,
        d: across({ x: start.right, y: start.y }, { x: end.left, y: end.y }) });
    };
    const lines = (from, to, kind) => of(from).flatMap((each) => of(to).map((other) => line(each, other, kind)));
    return [...lines("gateway", "tokenizer", "road"), ...lines("gateway", "output_processor", "road"),
      ...lines("gateway", "coordinator", "control"), ...lines("coordinator", "engine", "control"),
      ...lines("gateway", "encoder", "road"), ...lines("encoder", "engine", "control"),
      ...lines("output_processor", "engine", "road")];
  }

  /** Return a line for each pair of engines, drawn as moving for a moment after KV blocks were sent. */
  kvLinks(mesh, box) {
    const byName = new Map(mesh.engines.map((engine) => [engine.name, engine]));
    const now = performance.now();
    return mesh.kv_links.filter((link) => byName.has(link.source) && byName.has(link.target)).map((link) => {
      const pair = `${link.source}\n${link.target}`;
      const seen = this.links.get(pair) ?? { prompts: link.prompts, at: -HOT_MILLISECONDS };
      if (link.prompts > seen.prompts) seen.at = now;
      seen.prompts = link.prompts;
      this.links.set(pair, seen);
      const [from, to] = [box(byName.get(link.source)), box(byName.get(link.target))];
      return svg("path", { class: `kv-link${now - seen.at < HOT_MILLISECONDS ? " hot" : ""}`,
        d: around({ x: from.right, y: from.y }, { x: to.right, y: to.y }), "marker-end": "url(#tip)" });
    });
  }
}
