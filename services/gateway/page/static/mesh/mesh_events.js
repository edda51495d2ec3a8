// Lists what has changed in the mesh since the page was opened.

import { html } from "../dom.js";
import { isWell, levelOf } from "./part_states.js";
import { timeOfDay } from "../numbers.js";

const MAX_EVENTS = 4;

export class MeshEvents {
  constructor(root) {
    this.root = root;
    this.states = null; // by name; null until the mesh has been seen
    this.isSilent = false;
  }

  /** Compare the states of all parts with those seen before. */
  show(parts) {
    const states = new Map(parts.map((part) => [part.name, part.state]));
    if (this.isSilent) this.add("The gateway answers again", "ok");
    if (this.states) this.compare(this.states, states);
    this.states = states;
    this.isSilent = false;
  }

  /** Say, once, that the gateway does not answer. */
  silent() {
    if (!this.isSilent) this.add("The gateway does not answer", "bad");
    this.isSilent = true;
  }

  /** Add a line. `level`: ok, warn or bad. */
  add(text, level) {
    const line = html("li", { class: level }, html("time", {}, timeOfDay(new Date())), ` ${text}`);
    this.root.prepend(line);
    while (this.root.children.length > MAX_EVENTS) this.root.lastChild.remove();
  }

  /** Begin again: the parts are those of another mesh. */
  forget() {
    this.states = null;
    this.isSilent = false;
    this.root.replaceChildren();
  }

  compare(before, after) {
    for (const [name, state] of after) {
      const old = before.get(name);
      if (old === state) continue;
      if (old === undefined) this.add(`${name} has joined (${state})`, levelOf(state));
      else this.add(isWell(state) ? `${name} is serving again` : `${name} is ${state}`, levelOf(state));
    }
    for (const name of before.keys()) {
      if (!after.has(name)) this.add(`${name} has left`, "warn");
    }
  }
}
