// Fills a message with the answer that the gateway streams.

import { call, readEvents } from "../api.js";

const bytesOf = (entry) => new Uint8Array(entry.bytes ?? new TextEncoder().encode(entry.token));

/** Turns entries of `logprobs` into tokens; a character that several tokens share is shown with the last of them. */
const tokenReader = () => {
  const decoder = new TextDecoder();
  return (entry) => ({
    text: decoder.decode(bytesOf(entry), { stream: true }),
    logprob: entry.logprob,
    alternatives: (entry.top_logprobs ?? []).map(({ token, logprob }) => ({ text: token, logprob })),
  });
};

const addCall = (message, { index, id, function: called = {} }) => {
  message.toolCalls[index] ??= { id, name: called.name ?? "", arguments: "", result: undefined };
  message.toolCalls[index].arguments += called.arguments ?? "";
};

const addChoice = (message, choice, toToken) => {
  const { delta = {}, logprobs, finish_reason: reason } = choice;
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  if (delta.content || reasoning || delta.tool_calls) {
    message.firstAt ||= performance.now();
    message.numPieces += 1;
  }
  message.content += delta.content ?? "";
  message.reasoning += reasoning;
  for (const each of delta.tool_calls ?? []) addCall(message, each);
  message.tokens.push(...(logprobs?.content ?? []).map(toToken));
  if (reason) message.finishReason = reason;
};

/** Receive an answer until it ends, fails or `signal` is aborted; `onChange` is called after each piece. */
export const receive = async (message, body, signal, onChange) => {
  message.state = "streaming";
  message.startedAt = performance.now();
  const toToken = tokenReader();
  try {
    const response = await call("v1/chat/completions", { method: "POST", body, signal });
    for await (const event of readEvents(response)) {
      for (const choice of event.choices ?? []) addChoice(message, choice, toToken);
      message.usage = event.usage ?? message.usage;
      message.timeline = event.timeline ?? message.timeline;
      onChange();
    }
    message.state = "done";
  } catch (error) {
    message.state = error.name === "AbortError" ? "stopped" : "failed";
    message.error = message.state === "failed" ? error.message : "";
  }
  message.endedAt = performance.now();
  onChange();
};
