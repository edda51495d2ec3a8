// Lists the last requests of the gateway for operators: sizes, times and outcomes, no prompts.

import { byId, button, html, setText } from "../dom.js";
import { askForKeys, onKeys, readKey } from "../keys.js";
import { count, milliseconds, timeOfDay } from "../numbers.js";
import { Poll } from "../poll.js";

const SECONDS = 3;
const MAX_ROWS = 50;
const COLUMNS = ["Time", "Route", "Prompt", "Cached", "Output", "TTFT", "Total", "Outcome", "Key", "Request"];
const NUMBERS = new Set(["Prompt", "Cached", "Output", "TTFT", "Total"]);
const MONO = new Set(["Key", "Request"]);

const cells = (request) => [
  timeOfDay(new Date(1000 * request.finished_at)),
  request.route.replace(/^\/v1\//, ""),
  count(request.prompt_tokens),
  count(request.cached_tokens),
  count(request.output_tokens),
  request.ttft_seconds === null ? "–" : milliseconds(1000 * request.ttft_seconds),
  milliseconds(1000 * request.seconds),
  `${request.status}${request.reason ? ` ${request.reason}` : ""}`,
  request.key.slice(0, 8) || "–",
  request.request_id,
];

const row = (request) => {
  const level = request.status >= 400 || request.reason ? "bad" : "ok";
  return html("tr", {}, ...cells(request).map((text, index) => {
    const name = COLUMNS[index];
    const kind = name === "Outcome" ? level : NUMBERS.has(name) ? "number" : MONO.has(name) ? "mono" : undefined;
    return html("td", { class: kind, title: text }, text);
  }));
};

const table = (requests) => html("table", {},
  html("thead", {}, html("tr", {}, ...COLUMNS.map((name) =>
    html("th", { scope: "col", class: NUMBERS.has(name) ? "number" : undefined }, name)))),
  html("tbody", {}, ...requests.slice(0, MAX_ROWS).map(row)));

export const startRequests = () => {
  const root = byId("requests");
  const explain = (text) =>
    root.replaceChildren(html("p", { class: "note" }, `${text} `, button("Enter the admin key", () => askForKeys("admin"))));
  const show = ({ requests }) => {
    setText(byId("requests-note"), `The last ${requests.length} of this gateway, without prompts`);
    root.replaceChildren(requests.length ? table(requests) : html("p", { class: "note" }, "None yet."));
  };
  const fail = (error) => {
    if (error.status === 404) explain("This gateway has no admin key (--admin-api-key).");
    else if (error.status === 401 || error.status === 403) explain("The gateway does not accept this admin key.");
    else explain(error.message);
  };
  const poll = new Poll("requests", SECONDS, show, fail, "admin");
  const start = () => {
    if (!readKey("admin")) explain("The last requests are shown with the gateway's admin key (--admin-api-key).");
  };
  onKeys(start);
  start();
  poll.now();
};
