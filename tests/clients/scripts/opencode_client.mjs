// OpenCode: a task in a folder, which needs a shell, run to its end against a scripted model.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const out = process.env.OUT;
const home = join(out, "opencode-home");
mkdirSync(join(home, "opencode"), { recursive: true });
const provider = {
  npm: "@ai-sdk/openai-compatible",
  options: { baseURL: `${process.env.SCRIPTED_URL}/v1`, apiKey: "none" },
  models: { [process.env.SCRIPTED_MODEL]: { limit: { context: 262144, output: 8192 } } },
};
const config = { autoupdate: false, share: "disabled", permission: "allow", provider: { tokenloom: provider } };
writeFileSync(join(home, "opencode", "opencode.json"), JSON.stringify(config));
const opencode = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "opencode");
const options = ["run", "--model", `tokenloom/${process.env.SCRIPTED_MODEL}`];
const done = spawnSync(opencode, [...options, "Make the file made.txt."], {
  cwd: out,
  env: {
    ...process.env,
    HOME: home,
    PWD: out, // OpenCode works in the folder that this names
    XDG_CONFIG_HOME: home,
    XDG_DATA_HOME: join(home, "data"),
    XDG_CACHE_HOME: join(home, "cache"),
    XDG_STATE_HOME: join(home, "state"),
    OPENCODE_DISABLE_MODELS_FETCH: "1",
  },
  encoding: "utf8",
  input: "",
  timeout: 240_000,
});
console.log(done.stdout, done.stderr);
assert.equal(done.status, 0);
assert.equal(readFileSync(join(out, "made.txt"), "utf8").trim(), process.env.SCRIPTED_WORDS);
assert.ok(done.stdout.includes("The tool says:"), "the model's last words are printed");
console.log("a task with the shell: the file is made, the result is reported");
