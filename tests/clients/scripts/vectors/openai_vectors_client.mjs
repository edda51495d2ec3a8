// The openai package for JavaScript: embeddings as floats and as base64, and errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const model = process.env.TOKENLOOM_MODEL;
const client = new OpenAI({ baseURL: `${process.env.TOKENLOOM_URL}/v1`, apiKey: "none", maxRetries: 0 });
const input = ["What is a token?", "8 + 9 = 17."];

const whole = await client.embeddings.create({ model, input }); // the package asks for base64
const floats = await client.embeddings.create({ model, input, encoding_format: "float" });
assert.equal(whole.data.length, 2);
whole.data.forEach((item, index) =>
  item.embedding.forEach((value, at) => assert.ok(Math.abs(value - floats.data[index].embedding[at]) < 1e-6)));
await assert.rejects(client.embeddings.create({ model, input: [] }), (error) => error.param === "input");
console.log(`${whole.data.length} vectors of ${whole.data[0].embedding.length}`);
