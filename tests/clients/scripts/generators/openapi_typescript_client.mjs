// openapi-typescript and openapi-fetch: the types of the document compile, and a chat that is typed by them runs.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import openapiTS, { astToString } from "openapi-typescript";

const url = process.env.TOKENLOOM_URL;
const program = `import createClient from "openapi-fetch";
import type { paths } from "./api.js";

const client = createClient<paths>({ baseUrl: process.env.TOKENLOOM_URL! });
export async function chat(): Promise<string> {
  const { data, error } = await client.POST("/v1/chat/completions", {
    body: { messages: [{ role: "user", content: "What is a KV block?" }], max_tokens: 16, temperature: 0 },
  });
  if (data === undefined || !("choices" in data)) throw new Error(JSON.stringify(error)); // not a part of a stream
  return data.choices[0].message.content ?? "";
}
`;
// Beside this script, which runs in the folder of its modules: the compiler looks for packages from there.
const made = (name) => join(import.meta.dirname, name);
writeFileSync(made("api.ts"), astToString(await openapiTS(new URL(`${url}/openapi.json`))));
writeFileSync(made("chat.ts"), program);
const options = ["--strict", "--target", "es2022", "--module", "nodenext", "--types", "node", "--skipLibCheck"];
execFileSync("npx", ["tsc", ...options, made("chat.ts"), made("api.ts")], { stdio: "inherit", cwd: import.meta.dirname });
const { chat } = await import(pathToFileURL(made("chat.js")));
assert.ok(await chat());
console.log("types that compile in strict mode; a chat with openapi-fetch");
