// Knows which model the page is about, and lets the user choose among several.

import { byId, html, setText } from "./dom.js";

const listeners = new Set();
const meshListeners = new Set();
let chosen; // undefined: the first model of the gateway
let served;

/** Call a function when another model was chosen. */
export const onModel = (listener) => listeners.add(listener);

/** Call a function with the mesh whenever the gateway reports it. */
export const onMesh = (listener) => meshListeners.add(listener);

/** Return the name of the model; undefined until the gateway has reported it. */
export const modelName = () => chosen ?? served;

/** Return a path of the gateway that describes the mesh of the chosen model. */
export const ofModel = (path) => (chosen === undefined ? path : `${path}?model=${encodeURIComponent(chosen)}`);

/** Show the model, or a choice if there are several. */
export const showModels = (mesh) => {
  const { model, models } = mesh;
  served = model;
  for (const listener of meshListeners) listener(mesh);
  const select = byId("models");
  const isChoice = models.length > 1;
  byId("model").hidden = isChoice;
  select.hidden = !isChoice;
  setText(byId("model"), model);
  if ([...select.options].map((each) => each.value).join("\n") === models.join("\n")) return;
  select.replaceChildren(...models.map((name) => html("option", { value: name }, name)));
  select.value = modelName();
};

export const startModels = () => {
  byId("models").addEventListener("change", (event) => {
    chosen = event.target.value;
    for (const listener of listeners) listener();
  });
};
