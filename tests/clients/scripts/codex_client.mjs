// Codex CLI: a task in a folder, which needs a shell, run to its end against a scripted model.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const out = process.env.OUT;
const home = join(out, "codex-home");
mkdirSync(home);
writeFileSync(
  join(home, "config.toml"),
  `model = "${process.env.SCRIPTED_MODEL}"
model_provider = "tokenloom"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.tokenloom]
name = "Tokenloom"
base_url = "${process.env.SCRIPTED_URL}/v1"
env_key = "TOKENLOOM_API_KEY"
wire_api = "responses"
`,
);
const codex = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "codex");
const options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"];
const done = spawnSync(codex, ["exec", ...options, "Make the file made.txt."], {
  cwd: out,
  env: { ...process.env, CODEX_HOME: home, TOKENLOOM_API_KEY: "none" },
  encoding: "utf8",
  input: "",
  timeout: 240_000,
});
console.log(done.stdout, done.stderr);
assert.equal(done.status, 0);
assert.equal(readFileSync(join(out, "made.txt"), "utf8").trim(), process.env.SCRIPTED_WORDS);
assert.ok(done.stdout.includes(`The tool says:`), "the model's last words are printed");
console.log("a task with the shell: the file is made, the result is reported");
