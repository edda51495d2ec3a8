// Claude Code: a task in a folder, which needs a shell, run to its end against a scripted model.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const out = process.env.OUT;
const home = join(out, "claude-home");
mkdirSync(home);
const claude = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "claude");
const args = ["-p", "Make the file made.txt.", "--allowedTools", "Bash", "--model", process.env.SCRIPTED_MODEL];
const done = spawnSync(claude, args, {
  cwd: out,
  env: {
    ...process.env,
    HOME: home,
    CLAUDE_CONFIG_DIR: home,
    ANTHROPIC_BASE_URL: process.env.SCRIPTED_URL,
    ANTHROPIC_API_KEY: "none",
    ANTHROPIC_SMALL_FAST_MODEL: process.env.SCRIPTED_MODEL,
    ANTHROPIC_DEFAULT_HAIKU_MODEL: process.env.SCRIPTED_MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
    DISABLE_TELEMETRY: "1",
    DISABLE_ERROR_REPORTING: "1",
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
