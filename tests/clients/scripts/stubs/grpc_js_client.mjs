// The package that `make stubs` writes, installed as a user would, with @grpc/grpc-js.
import assert from "node:assert/strict";
import { credentials, status } from "@grpc/grpc-js";
import { FinishReason } from "tokenloom-client/types";
import { GenerateRequest, InferenceClient } from "tokenloom-client/inference";

const client = new InferenceClient(process.env.TOKENLOOM_GRPC, credentials.createInsecure());
const model = process.env.TOKENLOOM_MODEL;
const chat = { messages: [{ role: "user", content: "What is 3 plus 4?" }] };
const request = (fields) => GenerateRequest.fromPartial({ model, chat, samplingParams: { temperature: 0 }, ...fields });

const { models } = await new Promise((resolve, reject) =>
  client.listModels({}, (error, answer) => (error ? reject(error) : resolve(answer))),
);
assert.equal(models[0].name, model);

async function answered(call) {
  const texts = [];
  let usage, reason;
  for await (const part of call) {
    texts[part.index] = (texts[part.index] ?? "") + part.text;
    reason = part.finishReason || reason;
    usage = part.usage ?? usage;
  }
  return { texts, usage, reason };
}

const whole = await answered(client.generate(request({ userRequestId: "js" })));
assert.deepEqual(whole.texts, ["3 + 4 = 7."]);
assert.equal(whole.reason, FinishReason.FINISH_REASON_STOP);
assert.ok(whole.usage.promptTokens > 0 && whole.usage.completionTokens > 0);

const samples = await answered(client.generate(request({ n: 2, samplingParams: { topK: 1 } })));
assert.deepEqual(samples.texts, ["3 + 4 = 7.", "3 + 4 = 7."]);

const schema = JSON.stringify({ type: "object", properties: { sum: { type: "integer" } }, required: ["sum"] });
const constrained = await answered(client.generate(request({ samplingParams: { temperature: 0, maxTokens: 64, structuredOutputs: { json: schema } } })));
assert.equal(typeof JSON.parse(constrained.texts[0]).sum, "number");

const left = client.generate(request({ ignoreEos: true, samplingParams: { maxTokens: 200 } }));
for await (const part of left) {
  assert.equal(part.index, 0);
  break; // leaves the stream, which cancels the call
}

const refused = await answered(client.generate(request({ samplingParams: { temperature: -1 } }))).catch((error) => error);
assert.equal(refused.code, status.INVALID_ARGUMENT);
assert.match(refused.details, /temperature/);
assert.ok(refused.metadata.get("grpc-status-details-bin").length > 0);
client.close();
console.log("generated, compiled, installed: models, a streamed chat, two samples, a schema, one left, an error");
