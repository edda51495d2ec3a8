// Lets two settings or two models answer the same questions, side by side.

import { call } from "../api.js";
import { byId, html } from "../dom.js";
import { modelName } from "../model.js";
import { requestBody } from "./request_body.js";
import { Settings } from "./settings.js";

const SIDES = ["a", "b"];

/** Return a field of a body in words, such as "temperature 0". */
const inWords = (name, value) => {
  if (name === "model") return value;
  if (name === "messages") return `${value.length ? "" : "no "}system message`;
  const words = name.replaceAll("_", " ");
  if (value === undefined) return `default ${words}`;
  return typeof value === "object" ? words : `${words} ${value}`;
};

/** Return what is particular to a body among two. */
const differences = (body, other) => {
  const names = new Set([...Object.keys(body), ...Object.keys(other)]);
  return [...names].filter((name) => JSON.stringify(body[name]) !== JSON.stringify(other[name]))
    .map((name) => inWords(name, body[name]));
};

export class Comparison {
  /** `first`: the Settings of side a. `changed`: called when the comparison begins, ends or is set otherwise. */
  constructor(first, changed) {
    Object.assign(this, { first, changed, isOn: false });
    this.second = null; // the Settings of side b, made when they are first needed
    this.root = byId("settings-b");
    this.switch = byId("compare");
    this.switch.addEventListener("click", () => this.turn());
    byId("toggle-settings").addEventListener("click", () => this.open(byId("drawer").hidden));
    this.root.addEventListener("input", changed);
  }

  /** Return the sides that answer the next question; "" is the only one without a comparison. */
  get sides() {
    return this.isOn ? SIDES : [""];
  }

  /** Begin the comparison, or end it. */
  turn() {
    this.isOn = !this.isOn;
    if (this.isOn) {
      this.need();
      this.open(true);
    }
    this.show();
    if (this.isOn) this.model.focus();
    this.changed();
  }

  /** Show the settings, or hide them. */
  open(isOpen) {
    byId("drawer").hidden = !isOpen;
    byId("toggle-settings").setAttribute("aria-expanded", String(isOpen));
  }

  /** Make the settings of side b: the same as those of side a, until the user changes them. */
  need() {
    if (this.second) return;
    this.model = html("select", {}, html("option", { value: "" }, "the same"));
    this.second = new Settings(this.root, "b-", { model: this.model });
    this.second.fill(this.first.texts());
  }

  /** Offer what the gateway serves, adapters too. */
  async offerModels() {
    try {
      const { data } = await (await call("v1/models")).json();
      for (const { id } of data) this.offer(id);
    } catch { /* the same model is left */ }
  }

  offer(id) {
    if (![...this.model.options].some(({ value }) => value === id)) this.model.append(html("option", { value: id }, id));
  }

  show() {
    this.switch.setAttribute("aria-pressed", String(this.isOn));
    this.root.hidden = !this.isOn;
    if (this.isOn) this.offerModels();
  }

  /** Return the request of a side for messages. Raises SyntaxError for settings that are not right. */
  body(side, messages) {
    const settings = (side === "b" && this.second) || this.first;
    return requestBody(settings.read(), messages, (settings === this.second && this.model.value) || modelName());
  }

  /** Return how the answers of a side are headed: by what sets it apart. Raises SyntaxError as `body` does. */
  title(side) {
    if (!side) return "";
    const [own, other] = [side, SIDES.find((each) => each !== side)].map((each) => this.body(each, []));
    return [side.toUpperCase(), differences(own, other).join(", ")].filter(Boolean).join(": ");
  }

  /** Return what is to be kept beside the settings of side a. */
  texts() {
    return this.second ? { comparison: { isOn: this.isOn, ...this.second.texts() } } : {};
  }

  /** Set what was kept. */
  fill({ comparison }) {
    if (comparison) {
      this.need();
      this.offer(comparison.model);
      this.second.fill(comparison);
    }
    this.isOn = Boolean(comparison?.isOn);
    this.show();
  }
}
