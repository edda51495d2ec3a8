// buf curl, which knows the API by reflection alone.
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const buf = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "buf");
const url = `http://${process.env.TOKENLOOM_GRPC}`;
const curl = (...args) => execFileSync(buf, ["curl", "--protocol", "grpc", "--http2-prior-knowledge", ...args], { encoding: "utf8" });

const services = curl("--list-services", url);
for (const name of ["tokenloom.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health"]) assert.ok(services.includes(name), services);
assert.ok(curl("--list-methods", url).includes("tokenloom.v1.Inference/Generate"));

const model = process.env.TOKENLOOM_MODEL;
assert.equal(JSON.parse(curl(`${url}/tokenloom.v1.Inference/ListModels`)).models[0].name, model);
assert.equal(JSON.parse(curl(`${url}/grpc.health.v1.Health/Check`)).status, "SERVING");

const request = { model, text: "Once upon", samplingParams: { maxTokens: 8, temperature: 0 } };
const stream = curl("-d", JSON.stringify(request), `${url}/tokenloom.v1.Inference/Generate`);
assert.match(stream, /FINISH_REASON_LENGTH/);
assert.match(stream, /"completionTokens": ?8/);

const wrong = JSON.stringify({ ...request, samplingParams: { temperature: -1 } });
const refused = spawnSync(buf, ["curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", wrong, `${url}/tokenloom.v1.Inference/Generate`], { encoding: "utf8" });
assert.notEqual(refused.status, 0);
assert.match(refused.stderr, /temperature/);
console.log("services and methods by reflection, ListModels, health, Generate, errors with details");
