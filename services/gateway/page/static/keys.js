// Keeps the keys in this tab: in its session storage, which ends with the tab, and nowhere else.

import { byId } from "./dom.js";

const NAMES = { api: "tokenloom-api-key", admin: "tokenloom-admin-key" };
const listeners = new Set();

/** Return a key, or an empty string. `name`: api or admin. */
export const readKey = (name) => sessionStorage.getItem(NAMES[name]) ?? "";

/** Call a function whenever the keys have changed. */
export const onKeys = (listener) => listeners.add(listener);

const write = (name, value) => {
  if (value) sessionStorage.setItem(NAMES[name], value);
  else sessionStorage.removeItem(NAMES[name]);
};

/** Open the dialog in which the keys are entered. */
export const askForKeys = (name = "api") => {
  byId("api-key").value = readKey("api");
  byId("admin-key").value = readKey("admin");
  if (!byId("keys-dialog").open) byId("keys-dialog").showModal();
  byId(`${name}-key`).focus();
};

export const startKeys = () => {
  const dialog = byId("keys-dialog");
  byId("open-keys").addEventListener("click", () => askForKeys());
  byId("keys-form").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    event.preventDefault(); // the first button of the form would be Cancel
    dialog.close("save");
  });
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "save") {
      for (const name of Object.keys(NAMES)) write(name, byId(`${name}-key`).value.trim());
      for (const listener of listeners) listener();
    }
    byId("api-key").value = byId("admin-key").value = "";
    dialog.returnValue = "";
  });
};
