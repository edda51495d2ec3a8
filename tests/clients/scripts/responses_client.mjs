// The openai package's Responses API for JavaScript: whole, streamed, and a task with a tool to its end.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.TOKENLOOM_MODEL;
const client = new OpenAI({ baseURL: `${process.env.TOKENLOOM_URL}/v1`, apiKey: "none" });
const greedy = { model, input: "What is a KV block?", temperature: 0, max_output_tokens: 40 };

const whole = await client.responses.create(greedy);
assert.ok(whole.output_text);
const streamed = await client.responses.stream(greedy).finalResponse();
assert.equal(streamed.output_text, whole.output_text);
const stored = await client.responses.retrieve(whole.id);
assert.equal(stored.output_text, whole.output_text);
const after = await client.responses.create({ ...greedy, input: "And more?", previous_response_id: whole.id });
assert.ok(after.usage.input_tokens > whole.usage.total_tokens);
await assert.rejects(client.responses.create({ ...greedy, model: "other" }), OpenAI.NotFoundError);

const scripted = new OpenAI({ baseURL: `${process.env.SCRIPTED_URL}/v1`, apiKey: "none" });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
const task = { model: process.env.SCRIPTED_MODEL, tools };
const input = [{ role: "user", content: "What is the weather in Oslo?" }];
let last;
for (let turn = 0; turn < 5; turn++) {
  last = await scripted.responses.stream({ ...task, input }).finalResponse();
  const calls = last.output.filter((item) => item.type === "function_call");
  if (calls.length === 0) break;
  input.push(...last.output);
  for (const call of calls) {
    assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
    input.push({ type: "function_call_output", call_id: call.call_id, output: "It rains." });
  }
}
assert.match(last.output_text, /It rains\./);
console.log("responses, streams, retrieve, previous_response_id, errors, a task with a tool");
