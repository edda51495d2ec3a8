// Keeps the conversation of this tab while it grows, and finds it again after a reload.

import { byId, setText } from "../dom.js";
import { ChatStore } from "./chat_store.js";

const PAUSE_MS = 1000; // between two writes while an answer streams
const CURRENT = "tokenloom-chat"; // in the tab's storage: the id of its conversation
const TITLE = 80; // characters
const MAX_CHARACTERS = 8 << 20; // of a conversation with its images; larger ones are kept without them, by their names

const textOf = (messages) => messages.map(({ content, reasoning }) => `${content}\n${reasoning}`).join("\n");
const titleOf = ([first]) => first.content.trim().slice(0, TITLE) || "Images or sounds";

const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-"); // randomUUID needs TLS

/** Return a body, without its images and sounds if it would be too large. */
const bounded = (body) => {
  if (JSON.stringify(body).length <= MAX_CHARACTERS) return body;
  const messages = body.messages.map((message) => ({ ...message, pictures: message.pictures.map(({ name }) => ({ name, url: "" })) }));
  return { ...body, messages };
};

export class KeptChat {
  /** `read`: returns the messages and the settings of the conversation as they are now. */
  constructor(read) {
    this.store = new ChatStore();
    this.read = read;
    this.id = null; // until there is something to keep
    this.known = new Map(); // when this tab wrote or read a conversation last, by id
    this.timer = 0;
    this.writing = Promise.resolve(); // one write after the other: the last one must win
    addEventListener("pagehide", () => this.flush());
  }

  /** Keep the conversation soon. */
  touch() {
    this.timer ||= setTimeout(() => this.flush(), PAUSE_MS);
  }

  /** Keep the conversation now, as it is at this moment. */
  flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    const { messages, settings } = this.read();
    if (!messages.length) return this.writing;
    if (!this.id) this.use(newId());
    const body = bounded(structuredClone({ id: this.id, messages, settings }));
    const head = { title: titleOf(messages), bytes: JSON.stringify(body).length, text: textOf(messages) };
    return this.queue(() => this.save(head, body));
  }

  async save(head, body) {
    const known = this.known.get(body.id) ?? 0;
    const changed = Math.max(Date.now(), known + 1);
    let { id } = body;
    if (!(await this.store.save({ ...head, id, changed }, { ...body, changed }, known))) {
      id = newId(); // another tab goes on with this conversation: both are kept
      await this.store.save({ ...head, id, changed }, { ...body, id, changed }, 0);
      if (this.id === body.id) this.use(id);
    }
    this.known.set(id, changed);
  }

  keepSettings(settings) {
    return this.queue(() => this.store.keep("settings", settings));
  }

  /** Run a write behind those before it, and say if it fails. */
  queue(write) {
    this.writing = this.writing.then(write).then(
      () => setText(byId("kept-note"), ""),
      (error) => setText(byId("kept-note"), `This browser does not keep the conversation: ${error.message}`),
    );
    return this.writing;
  }

  /** Let this tab go on with a kept conversation, or with none. `known`: when it was written. */
  use(id, known = 0) {
    this.id = id;
    if (known) this.known.set(id, known);
    if (id) sessionStorage.setItem(CURRENT, id);
    else sessionStorage.removeItem(CURRENT);
  }

  /** Let another conversation begin; this one stays in the list. */
  leave() {
    if (this.timer) this.flush();
    this.use(null);
  }

  /** Forget conversations. The one of this tab must have been left before: what still streams would bring it back. */
  forget(...ids) {
    return this.queue(() => this.store.remove(...ids));
  }

  /** Return the conversation that this tab showed before it was loaded again; undefined if there is none. */
  async last() {
    const id = sessionStorage.getItem(CURRENT);
    return id ? this.store.body(id) : undefined;
  }

  /** Return the settings that were in use last; undefined if there are none. */
  settings() {
    return this.store.value("settings");
  }
}
