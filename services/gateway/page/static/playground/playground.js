// Lets a conversation with the model run: send, stop, regenerate, edit.

import { byId, html } from "../dom.js";
import { modelName, onMesh } from "../model.js";
import { receive } from "./answer_stream.js";
import { startCodeDialog } from "./code_dialog.js";
import { Conversation, Message, contentOf } from "./conversation.js";
import { MessageView } from "./message_view.js";
import { Pictures } from "./pictures.js";
import { measured, requestBody } from "./request_body.js";
import { Settings } from "./settings.js";

const NEAR = 60; // pixels from the end within which the list follows the answer

class Playground {
  constructor() {
    this.conversation = new Conversation();
    this.settings = new Settings(byId("settings"));
    this.views = new Map(); // by message
    this.list = byId("messages");
    this.draft = byId("draft");
    this.live = null; // the AbortController of the answer that streams
    this.pictures = new Pictures(); // that the next message shows
    this.actions = {
      regenerate: (message) => this.again(message),
      edited: (message, text, pictures) => this.edited(message, text, pictures),
      answered: () => this.answered(),
    };
    this.showEmpty();
  }

  /** Send what was written. */
  send() {
    const text = this.draft.value.trim();
    if ((!text && !this.pictures.chosen.length) || this.live) return;
    this.draft.value = "";
    this.append(new Message("user", text, this.pictures.release()));
    this.answer();
  }

  stop() {
    this.live?.abort();
  }

  /** Forget the conversation. */
  clear() {
    this.stop();
    this.live = null;
    this.conversation = new Conversation();
    this.views.clear();
    this.showEmpty();
    this.draft.focus();
  }

  /** Return the body of the request that the draft would make, or without one that of the last answer. Raises SyntaxError. */
  body() {
    const draft = this.draft.value.trim();
    const messages = this.conversation.forApi();
    const { chosen } = this.pictures;
    if (draft || chosen.length || !messages.length) {
      messages.push({ role: "user", content: contentOf(draft || (chosen.length ? "" : "Hello!"), chosen) });
    } else if (messages.at(-1).role === "assistant") messages.pop();
    return requestBody(this.settings.read(), messages, modelName());
  }

  /** Return the pictures of that request. */
  shown() {
    return [...this.conversation.pictures, ...this.pictures.chosen];
  }

  async answer() {
    let body;
    const message = new Message("assistant");
    try {
      body = requestBody(this.settings.read(), this.conversation.forApi(), modelName());
    } catch (error) {
      Object.assign(message, { state: "failed", error: `The settings are not right: ${error.message}` });
      this.append(message);
      return;
    }
    const live = new AbortController();
    this.live = live;
    Object.assign(message, { state: "streaming", limit: body.max_tokens ?? null, isJson: Boolean(body.response_format) });
    this.append(message);
    this.showLive();
    await receive(message, measured(body), live.signal, () => this.grown(message));
    if (this.live !== live) return; // another conversation has begun
    this.live = null;
    this.showLive();
  }

  /** Tell the answer that streams which parts the mesh lacks. */
  watch(missing) {
    if (this.live) this.views.get(this.conversation.messages.at(-1))?.waitFor(missing);
  }

  append(message) {
    this.conversation.add(message);
    const view = new MessageView(message, this.actions);
    this.views.set(message, view);
    this.list.querySelector(".empty")?.remove();
    this.list.append(view.root);
    this.list.scrollTop = this.list.scrollHeight;
  }

  grown(message) {
    const isNear = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < NEAR;
    this.views.get(message)?.show();
    if (isNear) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Answer once more in place of an answer. */
  again(message) {
    if (this.live) return;
    this.conversation.cutFrom(message);
    this.dropViews();
    this.answer();
    this.draft.focus();
  }

  edited(message, text, pictures) {
    if (this.live) return;
    Object.assign(message, { content: text, pictures });
    message.tokens = [];
    if (message.role === "user") this.conversation.cutAfter(message);
    this.dropViews();
    this.views.get(message).show();
    if (message.role === "user") this.answer();
  }

  /** Continue once every call of the last answer has its result. */
  answered() {
    const last = this.conversation.messages.at(-1);
    this.views.get(last)?.show();
    if (!this.live && last.toolCalls.every((each) => each.result !== undefined)) this.answer();
  }

  /** Remove the views of messages that are not part of the conversation any more. */
  dropViews() {
    const kept = new Set(this.conversation.messages);
    for (const [message, view] of this.views) {
      if (kept.has(message)) continue;
      view.root.remove();
      this.views.delete(message);
    }
  }

  showLive() {
    byId("stop").hidden = !this.live;
    byId("send").disabled = Boolean(this.live);
  }

  showEmpty() {
    this.showLive();
    this.list.replaceChildren(html("div", { class: "empty" },
      html("p", {}, "Talk to the model."),
      html("p", { class: "note" }, "Each answer shows where its time went. Settings hold tools, JSON schemas and log probabilities.")));
  }
}

const toggleSettings = () => {
  const form = byId("settings");
  form.hidden = !form.hidden;
  byId("toggle-settings").setAttribute("aria-expanded", String(!form.hidden));
};

export const startPlayground = () => {
  const playground = new Playground();
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    playground.send();
  });
  playground.draft.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    playground.send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) playground.stop();
  });
  onMesh(({ reads_images: images, reads_sounds: sounds, missing }) => {
    playground.pictures.allow(images, sounds);
    playground.watch(missing);
  });
  byId("stop").addEventListener("click", () => playground.stop());
  byId("new-chat").addEventListener("click", () => playground.clear());
  byId("toggle-settings").addEventListener("click", toggleSettings);
  startCodeDialog(() => playground.body(), () => playground.shown());
};
