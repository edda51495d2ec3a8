// Writes conversations as files for the user.

import { html } from "../dom.js";

const AUTHORS = { user: "You", assistant: "Model" };

const section = ({ role, title, content, reasoning, toolCalls, pictures }) => [
  `## ${AUTHORS[role] ?? role}${title ? ` ${title}` : ""}`,
  ...pictures.map(({ name }) => `(file ${name})`),
  ...(reasoning ? [reasoning.replaceAll(/^/gm, "> ")] : []),
  ...(content ? [content] : []),
  ...toolCalls.map((call) => `\`${call.name}(${call.arguments})\`${call.result === undefined ? "" : ` → ${call.result}`}`),
].join("\n\n");

/** Return a conversation as Markdown. */
export const toMarkdown = (title, { messages }) => [`# ${title.replaceAll(/\s+/g, " ")}`, ...messages.map(section), ""].join("\n\n");

/** Return all conversations as JSON, with what was measured. */
export const toJson = (heads, bodies) => {
  const byId = new Map(bodies.map((body) => [body.id, body]));
  const chats = heads.filter(({ id }) => byId.has(id)).map(({ id, title, changed }) =>
    ({ title, changed: new Date(changed).toISOString(), settings: byId.get(id).settings, messages: byId.get(id).messages }));
  return JSON.stringify({ format: "tokenloom-chats", version: 1, chats }, null, 2);
};

/** Let the browser save a text as a file. */
export const download = (name, type, text) => {
  const address = URL.createObjectURL(new Blob([text], { type }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000); // the browser may still ask the user where to
};

/** Return a title as the name of a file. */
export const fileName = (title, ending) =>
  `${title.replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "").slice(0, 50).toLowerCase() || "chat"}.${ending}`;
