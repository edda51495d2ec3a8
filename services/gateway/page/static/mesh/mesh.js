// Shows the mesh as the gateway reports it every second.

import { byId, html, setText } from "../dom.js";
import { askForKeys, readKey } from "../keys.js";
import { KillButton } from "./kill_button.js";
import { MeshEvents } from "./mesh_events.js";
import { MeshMap } from "./mesh_map.js";
import { onModel, showModels } from "../model.js";
import { count, milliseconds, several } from "../numbers.js";
import { Poll } from "../poll.js";
import { isBad, isWell } from "./part_states.js";

const SECONDS = 1;

const showHealth = (kind, text) => {
  const pill = byId("health");
  pill.className = `pill ${kind}`;
  setText(pill, text);
};

const judge = ({ missing, parts, engines }) => {
  const all = [...parts, ...engines];
  const lost = all.filter((part) => isBad(part.state));
  if (missing.length) return ["bad", `No ${missing.map((part) => part.replace("_", " ")).join(", no ")}`];
  if (lost.length === 1) return ["bad", `${lost[0].name} is ${lost[0].state}`];
  if (lost.length) return ["bad", `${several(lost.length, "part is", "parts are")} lost`];
  const others = all.filter((part) => !isWell(part.state));
  if (others.length) return ["warn", `${others[0].name} is ${others[0].state}`];
  return ["ok", `All ${all.length} parts are serving`];
};

const summary = ({ engines, max_model_len, placement }) => {
  const running = engines.reduce((sum, engine) => sum + (engine.running ?? 0), 0);
  const waiting = engines.reduce((sum, engine) => sum + (engine.waiting ?? 0), 0);
  const context = max_model_len ? ` · context of ${count(max_model_len)} tokens` : "";
  const rule = placement ? ` · placement by ${placement}` : "";
  return `${count(running)} running, ${count(waiting)} waiting${context}${rule}`;
};

const showLinks = (links) => {
  const sorted = links.toSorted((a, b) => `${a.source} ${a.target}`.localeCompare(`${b.source} ${b.target}`));
  byId("kv-links").replaceChildren(...sorted.map((link) => html("li", {},
    html("b", {}, link.source), " sends KV to ", html("b", {}, link.target), ": ",
    `${several(link.prompts, "prompt")}, ${several(link.tokens, "token")}, waited ${
      milliseconds(link.wait_ms / Math.max(link.prompts, 1))} each`)));
};

export const startMesh = () => {
  const map = new MeshMap(byId("map"));
  const events = new MeshEvents(byId("events"));
  const killButton = new KillButton((text, kind) => events.add(text, kind));
  let asked = false;

  const show = (mesh) => {
    showModels(mesh);
    showHealth(...judge(mesh));
    setText(byId("mesh-summary"), summary(mesh));
    map.show(mesh);
    events.show([...mesh.parts, ...mesh.engines]);
    showLinks(mesh.kv_links);
    killButton.show(mesh.kill_engine);
  };
  const fail = (error) => {
    if (error.status === 401) {
      showHealth("warn", readKey("api") ? "The gateway does not accept this API key" : "The gateway asks for an API key");
      if (!asked) askForKeys();
      asked = true;
    } else if (error.status === 0) {
      showHealth("bad", "The gateway does not answer");
      events.silent();
      map.showGateway("lost");
    } else {
      showHealth("bad", error.message);
    }
  };
  const poll = new Poll("mesh", SECONDS, show, fail);
  onModel(() => {
    events.forget();
    poll.now();
  });
  poll.now();
};
