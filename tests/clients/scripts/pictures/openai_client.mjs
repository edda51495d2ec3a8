// The openai package for JavaScript: a picture in a chat, in a stream and in responses.
import assert from "node:assert/strict";
import fs from "node:fs";
import OpenAI from "openai";

const { PICTURE_URL, PICTURE_MODEL: model, PICTURE_FILE } = process.env;
const client = new OpenAI({ baseURL: `${PICTURE_URL}/v1`, apiKey: "none", maxRetries: 0 });
const url = `data:image/png;base64,${fs.readFileSync(PICTURE_FILE, "base64")}`;
const question = "What is in the picture?";
const answer = "There is a yellow star to the left of a blue circle.";
const messages = [{ role: "user", content: [{ type: "image_url", image_url: { url } }, { type: "text", text: question }] }];

const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
assert.equal(whole.choices[0].message.content, answer);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(streamed, answer);
const content = [{ type: "input_image", image_url: url }, { type: "input_text", text: question }];
const response = await client.responses.create({ model, input: [{ role: "user", content }], temperature: 0 });
assert.equal(response.output_text, answer);
await assert.rejects(
  client.chat.completions.create({ model, messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: "data:image/png;base64,AAAA" } }] }] }),
  (error) => error instanceof OpenAI.BadRequestError);
console.log("chats, a stream, responses, an error");
