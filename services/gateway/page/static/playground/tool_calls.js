// Shows the calls of tools in an answer, and takes their results.

import { html } from "../dom.js";

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still streams, or the model has written no JSON
  }
};

const resultForm = (call, onResult) => {
  const input = html("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${call.name}`,
    placeholder: "Result that the model gets" });
  return html("form", { class: "tool-result", submit: (event) => {
    event.preventDefault();
    call.result = input.value;
    onResult();
  } }, input, html("button", { class: "button", type: "submit" }, "Send result"));
};

/** Return a card for each call of a message. `onResult`: called when a result was entered. */
export const toolCards = (message, onResult) => message.toolCalls.map((call) => html("div", { class: "tool-call" },
  html("span", { class: "tool-name" }, html("b", {}, call.name), ` ${call.id}`),
  html("pre", {}, pretty(call.arguments)),
  message.state === "streaming" ? null
    : call.result === undefined ? resultForm(call, onResult)
      : html("pre", { class: "tool-answer" }, call.result)));
