// Shows an answer as tokens, coloured by probability, with an inspector for the one that is chosen.

import { html } from "../dom.js";
import { percent } from "../numbers.js";

const LIMITS = [0.9, 0.6, 0.3, 0.1]; // lower ends of the levels 0 to 3
const levelOf = (logprob) => {
  const level = LIMITS.findIndex((limit) => Math.exp(logprob) >= limit);
  return level < 0 ? LIMITS.length : level;
};

const visible = (text) => JSON.stringify(text).slice(1, -1) || "(part of a character)";

const share = (logprob) => {
  const fill = html("i");
  fill.style.width = `${100 * Math.exp(logprob)}%`;
  return html("span", { class: "meter" }, fill);
};

const alternative = ({ text, logprob }, isChosen) => html("li", { class: isChosen ? "chosen" : undefined },
  html("code", {}, visible(text)), share(logprob), html("span", { class: "usage" }, percent(Math.exp(logprob))));

let lastNumber = 0;

export class TokenView {
  constructor() {
    this.number = ++lastNumber; // makes the ids of its elements unique
    this.tokens = [];
    this.at = -1;
    this.text = html("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", tabindex: "0",
      "aria-orientation": "horizontal", keydown: (event) => this.press(event),
      click: (event) => this.choose(Number(event.target.dataset?.at ?? -1)),
      focus: () => this.at < 0 && this.choose(0) });
    this.inspector = html("div", { class: "inspector", role: "status" });
    this.hint = html("p", { class: "note" }, "Choose a token with the pointer or the arrow keys.");
    this.inspector.append(this.hint);
    this.legend = html("p", { class: "token-legend note" }, "Probability ",
      ...["≥ 90 %", "≥ 60 %", "≥ 30 %", "≥ 10 %", "less"].map((text, level) => html("span", { class: `p${level}` }, text)));
    this.root = html("div", { class: "token-view" }, this.text, this.legend, this.inspector);
  }

  /** Add spans for tokens that are not shown yet. */
  show(tokens) {
    const spans = tokens.slice(this.tokens.length).map((token, index) => {
      const at = this.tokens.length + index;
      return html("span", { role: "option", id: `token-${this.number}-${at}`, "data-at": at, class: `p${levelOf(token.logprob)}`,
        "aria-label": `${visible(token.text)}, ${percent(Math.exp(token.logprob))}` }, token.text);
    });
    this.text.append(...spans);
    this.tokens = [...tokens];
  }

  choose(at) {
    if (!(at >= 0 && at < this.tokens.length)) return;
    this.text.children[this.at]?.removeAttribute("aria-selected");
    this.at = at;
    const span = this.text.children[at];
    span.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", span.id);
    const token = this.tokens[at];
    const others = token.alternatives.filter((each) => each.logprob !== token.logprob);
    const rows = [alternative(token, true), ...others.map((each) => alternative(each, false))];
    const title = html("p", { class: "note" }, `Token ${at + 1} of ${this.tokens.length}, log probability ${
      token.logprob.toFixed(3).replace("-0.000", "0.000")}`);
    this.inspector.replaceChildren(title, html("ul", {}, ...rows));
  }

  press(event) {
    const last = this.tokens.length - 1;
    const goals = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last };
    if (!(event.key in goals)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(goals[event.key], 0), last));
  }
}
