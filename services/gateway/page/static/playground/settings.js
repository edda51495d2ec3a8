// The form with the settings of the playground.

import { button, html } from "../dom.js";

const TOOLS = [{ type: "function", function: { name: "get_weather", description: "Current weather in a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const SCHEMA = { type: "object", properties: { answer: { type: "string" }, certain: { type: "boolean" } },
  required: ["answer", "certain"], additionalProperties: false };

const field = (label, input, ...more) => html("label", { class: "field" }, html("span", {}, label), input, ...more);

const number = (attributes) => html("input", { type: "number", inputmode: "decimal", placeholder: "model's", ...attributes });

const select = (values) => html("select", {}, ...values.map(([value, text]) => html("option", { value }, text)));

/** A text area that holds JSON or nothing. */
class JsonField {
  constructor(label, id, example, isRight, wanted) {
    Object.assign(this, { isRight, wanted });
    this.problem = html("span", { class: "problem", role: "status" });
    this.input = html("textarea", { rows: 4, spellcheck: "false", class: "mono", placeholder: "none",
      input: () => this.read() });
    const insert = button("Example", () => {
      this.input.value = JSON.stringify(example, null, 2);
      this.read();
    });
    this.root = html("div", { class: "field wide" },
      html("span", { class: "field-head" }, html("label", { for: id }, label), insert),
      this.input, this.problem);
    this.input.id = id;
  }

  /** Return the value; null if there is none. Raises SyntaxError for text that is not right. */
  value() {
    if (!this.input.value.trim()) return null;
    const value = JSON.parse(this.input.value);
    if (!this.isRight(value)) throw new SyntaxError(this.wanted);
    return value;
  }

  read() {
    let problem = "";
    try {
      this.value();
    } catch (error) {
      problem = error.message;
    }
    this.problem.textContent = problem;
    this.input.setAttribute("aria-invalid", problem ? "true" : "false");
  }
}

export class Settings {
  /** `prefix`: makes the ids of its elements unique. `more`: further inputs, by name, which come first. */
  constructor(root, prefix = "", more = {}) {
    this.more = more;
    this.system = html("textarea", { rows: 2, placeholder: "none" });
    this.numbers = {
      max_tokens: number({ min: 1, step: 1, placeholder: "the model's limit" }),
      temperature: number({ min: 0, max: 2, step: 0.1 }),
      top_p: number({ min: 0, max: 1, step: 0.05 }),
      seed: number({ step: 1, placeholder: "random" }),
    };
    this.alternatives = select([["", "off"], ["0", "on"], ["3", "3 alternatives"], ["5", "5 alternatives"]]);
    this.toolChoice = select([["auto", "auto"], ["required", "required"], ["none", "none"]]);
    this.tools = new JsonField("Tools", `${prefix}tools`, TOOLS, Array.isArray, "a list of tools is needed");
    this.schema = new JsonField("JSON schema of the answer", `${prefix}schema`, SCHEMA,
      (value) => typeof value === "object" && !Array.isArray(value), "an object is needed");
    root.append(
      ...Object.entries(more).map(([name, input]) => field(name[0].toUpperCase() + name.slice(1), input)),
      html("div", { class: "field wide" }, field("System message", this.system)),
      field("Max tokens", this.numbers.max_tokens),
      field("Temperature", this.numbers.temperature),
      field("Top p", this.numbers.top_p),
      field("Seed", this.numbers.seed),
      field("Log probabilities", this.alternatives),
      field("Tool choice", this.toolChoice),
      this.tools.root, this.schema.root);
    root.addEventListener("submit", (event) => event.preventDefault());
  }

  get inputs() {
    const { more, system, numbers, alternatives, toolChoice, tools, schema } = this;
    return { ...more, system, ...numbers, alternatives, toolChoice, tools: tools.input, schema: schema.input };
  }

  /** Return what the fields hold, as text. */
  texts() {
    return Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
  }

  /** Set the fields. `texts`: as `texts()` has returned them; missing ones stay. */
  fill(texts) {
    for (const [name, input] of Object.entries(this.inputs)) input.value = texts[name] ?? input.value;
    for (const field of [this.tools, this.schema]) field.read();
  }

  /** Return the settings. Raises SyntaxError for JSON that is not right. */
  read() {
    const numbers = Object.entries(this.numbers).map(([name, input]) =>
      [name, input.value === "" ? null : input.valueAsNumber]);
    return {
      ...Object.fromEntries(numbers),
      system: this.system.value.trim(),
      alternatives: this.alternatives.value === "" ? null : Number(this.alternatives.value),
      tools: this.tools.value(),
      toolChoice: this.toolChoice.value,
      schema: this.schema.value(),
    };
  }
}
