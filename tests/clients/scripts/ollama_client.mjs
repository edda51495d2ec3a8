// The ollama package for JavaScript: models, chats, streams, errors, and a task with a tool to its end.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const model = process.env.TOKENLOOM_MODEL;
const client = new Ollama({ host: process.env.TOKENLOOM_URL });
const messages = [{ role: "user", content: "What is a KV block?" }];
const options = { temperature: 0, num_predict: 40 };

assert.deepEqual((await client.list()).models.map((each) => each.model), [model]);
assert.ok((await client.show({ model })).capabilities.includes("completion"));
const whole = await client.chat({ model, messages, options });
assert.ok(whole.message.content);
let text = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) text += part.message.content;
assert.equal(text, whole.message.content);
assert.equal((await client.generate({ model, prompt: messages[0].content, options })).response, text);
await assert.rejects(client.chat({ model: "other", messages }), /other/);

const scripted = new Ollama({ host: process.env.SCRIPTED_URL });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Returns the weather.", parameters } }];
const turns = [{ role: "user", content: "What is the weather in Oslo?" }];
let asked;
for await (const part of await scripted.chat({ model: process.env.SCRIPTED_MODEL, messages: turns, tools, stream: true })) {
  if (part.message.tool_calls) asked = part.message;
}
assert.deepEqual(asked.tool_calls[0].function, { name: "get_weather", arguments: { city: "Oslo" } });
turns.push(asked, { role: "tool", tool_name: "get_weather", content: "It rains." });
const last = await scripted.chat({ model: process.env.SCRIPTED_MODEL, messages: turns, tools });
assert.match(last.message.content, /It rains\./);
console.log("list, show, chats, streams, generate, errors, a task with a tool");
