// Shows where the time of an answer went.

import { html } from "../dom.js";
import { milliseconds, several } from "../numbers.js";

const SLOW_MS = 2000; // from which an answer links to its timeline
const SHARE = 0.001; // parts below it are not shown

/** Return the parts of the time that follow each other, in milliseconds. */
const partsOf = (timeline) => {
  const { tokenize_ms: tokenize, placement_ms: placement, queued_ms: queued, prefill_ms: prefill } = timeline;
  const { kv_transfer_ms: transfer, decode_ms: decoding, detokenize_ms: detokenize, total_ms: total } = timeline;
  const decode = Math.max(decoding - transfer - detokenize, 0); // decoding includes the two
  const between = Math.max(total - tokenize - placement - queued - prefill - decoding, 0);
  return [["tokenize", tokenize], ["placement", placement], ["queue", queued], ["prefill", prefill],
    ["KV transfer", transfer], ["decode", decode], ["detokenize", detokenize], ["between services", between]];
};

const bar = (timeline) => {
  const parts = partsOf(timeline);
  const total = parts.reduce((sum, [, time]) => sum + time, 0) || 1;
  const shown = parts.map(([name, time], index) => ({ name, time, index })).filter(({ time }) => time / total > SHARE);
  const segments = shown.map(({ name, time, index }) => {
    const segment = html("i", { class: `t${index}`, title: `${name} ${milliseconds(time)}` });
    segment.style.flexGrow = time / total;
    return segment;
  });
  const legend = shown.map(({ name, time, index }) =>
    html("li", {}, html("i", { class: `t${index}` }), `${name} `, html("b", {}, milliseconds(time))));
  return [html("div", { class: "timeline-bar", "aria-hidden": "true" }, ...segments),
    html("ul", { class: "timeline-legend", "aria-label": "Where the time went" }, ...legend)];
};

const engines = ({ prefill_engine: prefill, decode_engine: decode }) => {
  if (!prefill || prefill === decode) return decode;
  return `${prefill} → ${decode}`.replaceAll(" ", "\u00a0").replaceAll("-", "\u2011");
};

/** Return a line about the answer as the page measured it. */
const measured = (message) => {
  const facts = [];
  const numTokens = message.usage?.completion_tokens ?? 0;
  if (message.firstAt) facts.push(`first output ${milliseconds(message.firstAt - message.startedAt)}`);
  if (numTokens) {
    facts.push(several(numTokens, "token"));
    const decoding = message.timeline?.decode_ms ?? message.endedAt - message.firstAt;
    const seconds = decoding / 1000;
    if (numTokens > 1 && seconds > 0) facts.push(`${((numTokens - 1) / seconds).toFixed(0)} tokens/s`);
    const cached = message.usage.prompt_tokens_details?.cached_tokens;
    facts.push(`prompt of ${several(message.usage.prompt_tokens, "token")}${cached ? `, ${cached} cached` : ""}`);
  }
  if (message.timeline) facts.push(engines(message.timeline));
  if (message.state === "stopped") facts.unshift(`stopped after ${several(message.numPieces, "piece")}`);
  return facts.filter(Boolean).join(" · ");
};

const idOf = (message) => `timeline-${message.id}`;

/** Return a link to the timeline of an answer that took long, which names its longest part; null for others. */
export const slowLink = (message) => {
  const total = message.timeline?.total_ms ?? 0;
  if (total < SLOW_MS) return null;
  const [longest] = partsOf(message.timeline).toSorted(([, a], [, b]) => b - a);
  return html("a", { class: "button quiet", href: `#${idOf(message)}`, title: "Where the time went" },
    `${milliseconds(total)}, mostly ${longest[0]}`);
};

/** Return the elements under an answer that has ended. */
export const timelineOf = (message) =>
  html("div", { class: "timeline", id: idOf(message), tabindex: "-1" }, ...(message.timeline ? bar(message.timeline) : []),
    html("p", { class: "note" }, measured(message)));
