// @hey-api/openapi-ts: a client is generated, compiles, chats and gets an error in its type.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { createClient } from "@hey-api/openapi-ts";

const url = process.env.TOKENLOOM_URL;
const made = (name) => join(import.meta.dirname, name);
await createClient({ input: `${url}/openapi.json`, output: made("generated"), logs: { level: "silent" } });
writeFileSync(
  made("chat.ts"),
  `import { client } from "./generated/client.gen";
import { postV1ChatCompletions } from "./generated/sdk.gen";

client.setConfig({ baseUrl: process.env.TOKENLOOM_URL! });
export const chat = (max_tokens: number) =>
  postV1ChatCompletions({
    body: { messages: [{ role: "user", content: "What is a KV block?" }], max_tokens, temperature: 0 },
  });
`,
);
const options = ["--strict", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"];
const where = { stdio: "inherit", cwd: import.meta.dirname };
execFileSync("npx", ["tsc", ...options, "--types", "node", "--skipLibCheck", "--noEmit", made("chat.ts")], where);
execFileSync("npx", ["esbuild", made("chat.ts"), "--bundle", "--format=esm", `--outfile=${made("chat.mjs")}`], where);
const { chat } = await import(pathToFileURL(made("chat.mjs")));
assert.ok((await chat(16)).data.choices[0].message.content);
assert.equal((await chat(10 ** 8)).error.error.code, "context_length_exceeded");
console.log("a client that compiles in strict mode; a chat, an error");
