// The AI SDK with its provider for OpenAI-compatible servers: texts, streams, objects by a schema, tools.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "tokenloom",
  baseURL: `${process.env.TOKENLOOM_URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.TOKENLOOM_MODEL);
const asking = { model, prompt: "What is a KV block?", temperature: 0, maxOutputTokens: 40, maxRetries: 0 };

const whole = await generateText(asking);
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens > 0);

const stream = streamText({ ...asking, onError: ({ error }) => { throw error; } });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

const { object } = await generateObject({ ...asking, maxOutputTokens: 200, schema: z.object({ sure: z.boolean() }) });
assert.equal(typeof object.sure, "boolean");

const { output } = await generateText({ ...asking, maxOutputTokens: 200, output: Output.object({ schema: z.object({ topic: z.enum(["memory", "time"]) }) }) });
assert.ok(["memory", "time"].includes(output.topic));

const tools = { answer: tool({ description: "Answers.", inputSchema: z.object({ sure: z.boolean() }), execute: ({ sure }) => `sure: ${sure}` }) };
const calling = { ...asking, maxOutputTokens: 200, tools, toolChoice: { type: "tool", toolName: "answer" } };
const called = await generateText(calling);
assert.equal(called.finishReason, "tool-calls");
assert.match(called.toolResults[0].output, /^sure: (true|false)$/);
const streamed = streamText({ ...calling, onError: ({ error }) => { throw error; } });
await streamed.consumeStream();
assert.deepEqual((await streamed.toolCalls).map((call) => call.input), called.toolCalls.map((call) => call.input));

const completion = await generateText({ ...asking, model: provider.completionModel(process.env.TOKENLOOM_MODEL) });
assert.ok(completion.text);
await assert.rejects(generateText({ ...asking, temperature: -1 }), /temperature/);
console.log("generateText, streamText, generateObject, Output.object, tools, a completion model, errors");
