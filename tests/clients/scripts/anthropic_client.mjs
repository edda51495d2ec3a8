// Anthropic's package for JavaScript: messages, streams, a tool and its result, token counts, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const model = process.env.TOKENLOOM_MODEL;
const client = new Anthropic({ baseURL: process.env.TOKENLOOM_URL, apiKey: "none" });
const question = { role: "user", content: "What is a KV block?" };
const greedy = { model, max_tokens: 200, temperature: 0 };

const whole = await client.messages.create({ ...greedy, messages: [question] });
assert.ok(whole.content[0].text);
assert.equal(whole.stop_reason, "end_turn");

let text = "";
const stream = client.messages.stream({ ...greedy, messages: [question] }).on("text", (piece) => (text += piece));
const last = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.equal(last.usage.output_tokens, whole.usage.output_tokens);

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"] };
const tools = [{ name: "answer", input_schema: schema }];
const asked = await client.messages.create({ ...greedy, messages: [question], tools, tool_choice: { type: "any" } });
const call = asked.content.at(-1);
assert.equal(typeof call.input.sure, "boolean");
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "It is." }] };
const turns = [question, { role: "assistant", content: asked.content }, result];
const after = await client.messages.create({ ...greedy, messages: turns, tools, tool_choice: { type: "none" } });
assert.ok(after.content[0].text);

const count = await client.messages.countTokens({ model, messages: [question] });
assert.equal(count.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
await assert.rejects(client.messages.create({ ...greedy, messages: [] }), Anthropic.BadRequestError);
await assert.rejects(client.messages.create({ ...greedy, model: "other", messages: [question] }), Anthropic.NotFoundError);

const scripted = new Anthropic({ baseURL: process.env.SCRIPTED_URL, apiKey: "none" });
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { model: process.env.SCRIPTED_MODEL, max_tokens: 200, tools: [{ name: "get_weather", input_schema }] };
const conversation = [{ role: "user", content: "What is the weather in Oslo?" }];
const calling = await scripted.messages.stream({ ...weather, messages: conversation }).finalMessage();
assert.equal(calling.stop_reason, "tool_use");
const { id, input } = calling.content.at(-1);
assert.deepEqual(input, { city: "Oslo" });
const rain = { role: "user", content: [{ type: "tool_result", tool_use_id: id, content: "It rains." }] };
conversation.push({ role: "assistant", content: calling.content }, rain);
const report = await scripted.messages.create({ ...weather, messages: conversation });
assert.match(report.content[0].text, /It rains\./);
console.log("messages, streams, a tool and its result, countTokens, errors, a task");
