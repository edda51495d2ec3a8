// The openai package for JavaScript: models, chats, streams, schemas, tools, completions, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.TOKENLOOM_MODEL;
const client = new OpenAI({ baseURL: `${process.env.TOKENLOOM_URL}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: "What is a KV block?" }];
const greedy = { model, messages, temperature: 0, max_tokens: 40 };

const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);

const whole = await client.chat.completions.create(greedy);
assert.ok(whole.choices[0].message.content);

let text = "", usage;
const stream = await client.chat.completions.create({ ...greedy, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.deepEqual(usage, whole.usage);

const helper = client.chat.completions.stream(greedy);
assert.equal((await helper.finalChatCompletion()).choices[0].message.content, text);

const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const json = await client.chat.completions.create({
  ...greedy,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
});
assert.equal(typeof JSON.parse(json.choices[0].message.content).sure, "boolean");

const parsed = await client.chat.completions.parse({
  ...greedy,
  max_tokens: 200,
  response_format: zodResponseFormat(z.object({ topic: z.enum(["memory", "time"]) }), "answer"),
});
assert.ok(["memory", "time"].includes(parsed.choices[0].message.parsed.topic));

let heard;
const runner = client.chat.completions.runTools({
  ...greedy,
  max_tokens: 200,
  stream: true,
  tool_choice: { type: "function", function: { name: "answer" } },
  tools: [{ type: "function", function: { name: "answer", parse: JSON.parse, parameters: schema, function: (told) => (heard = told) && "noted" } }],
});
await runner.done();
assert.equal(typeof heard.sure, "boolean");
assert.equal(runner.messages.at(-1).content, "noted");

const left = await client.chat.completions.create({ ...greedy, stream: true });
for await (const _ of left) break;

const completion = await client.completions.create({ model, prompt: "Once upon", max_tokens: 5, logprobs: 1 });
assert.equal(completion.choices[0].logprobs.tokens.length, completion.usage.completion_tokens);

await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");
await assert.rejects(client.chat.completions.create({ ...greedy, model: "other" }), OpenAI.NotFoundError);
console.log("models, chats, streams, one left, the stream helper, schemas, a parsed answer, runTools, completions, errors");
