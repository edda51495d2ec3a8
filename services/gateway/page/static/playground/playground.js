// Lets a conversation with the model run: send, stop, regenerate, edit.

import { byId, button, html } from "../dom.js";
import { modelName, onMesh } from "../model.js";
import { startChats } from "../chats/chat_dialog.js";
import { KeptChat } from "../chats/kept_chat.js";
import { receive } from "./answer_stream.js";
import { startCodeDialog } from "./code_dialog.js";
import { Comparison } from "./comparison.js";
import { Conversation, Message, contentOf } from "./conversation.js";
import { aboutModel } from "./first_questions.js";
import { MessageView } from "./message_view.js";
import { Pictures } from "./pictures.js";
import { measured } from "./request_body.js";
import { Settings } from "./settings.js";

const NEAR = 60; // pixels from the end within which the list follows the answer

class Playground {
  constructor() {
    this.conversation = new Conversation();
    this.settings = new Settings(byId("settings"));
    this.comparison = new Comparison(this.settings, () => this.changed());
    this.views = new Map(); // by message
    this.list = byId("messages");
    this.draft = byId("draft");
    this.live = null; // the AbortController of the answers that stream
    this.pictures = new Pictures(); // that the next message shows
    this.actions = {
      regenerate: (message) => this.again(message),
      edited: (message, text, pictures) => this.edited(message, text, pictures),
      answered: () => this.answered(),
    };
    this.kept = new KeptChat(() => ({ messages: this.conversation.messages, settings: this.texts() }));
    this.showEmpty();
  }

  /** Show the conversation and the settings that this tab had before it was loaded again. */
  async restore() {
    try {
      const body = await this.kept.last();
      const texts = body?.settings ?? (await this.kept.settings());
      if (this.conversation.messages.length) return; // the user was faster
      if (body) this.open(body);
      else if (texts) this.fill(texts);
    } catch { /* the browser keeps nothing; the first write says so */ }
  }

  /** Show a kept conversation. */
  open(body) {
    this.leave(Conversation.restore(body.messages));
    this.kept.use(body.id, body.changed);
    this.fill(body.settings);
    this.showLive();
    this.list.replaceChildren();
    for (const message of this.conversation.messages) this.show(message);
    this.list.scrollTop = this.list.scrollHeight;
    this.draft.focus();
  }

  /** Leave the conversation, which stays among the kept ones, for another. */
  leave(conversation) {
    this.stop();
    this.live = null;
    this.kept.leave();
    this.conversation = conversation;
    this.views.clear();
  }

  /** Return all settings as they are kept. */
  texts() {
    return { ...this.settings.texts(), ...this.comparison.texts() };
  }

  fill(texts) {
    this.settings.fill(texts);
    this.comparison.fill(texts);
  }

  /** Keep changed settings, for this conversation and for the next. */
  changed() {
    this.kept.keepSettings(this.texts());
    this.kept.touch();
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

  /** Begin another conversation. */
  clear() {
    this.leave(new Conversation());
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
    return this.comparison.body("", messages);
  }

  /** Return the pictures of that request. */
  shown() {
    return [...this.conversation.pictures, ...this.pictures.chosen];
  }

  /** Let the model answer. `sides`: those of a comparison that do. */
  async answer(sides = this.comparison.sides) {
    let begun;
    try {
      begun = sides.map((side) => this.begin(side));
    } catch (error) {
      const message = new Message("assistant");
      this.append(Object.assign(message, { state: "failed", error: `The settings are not right: ${error.message}` }));
      return;
    }
    const live = new AbortController();
    this.live = live;
    for (const { message } of begun) this.append(message);
    this.showLive();
    await Promise.all(begun.map(({ message, body }) =>
      receive(message, measured(body), live.signal, () => this.grown(message))));
    if (this.live !== live) return; // another conversation has begun
    this.live = null;
    this.showLive();
    this.kept.flush();
  }

  /** Return an answer that is about to stream, and its request. Raises SyntaxError for settings that are not right. */
  begin(side) {
    const body = this.comparison.body(side, this.conversation.forApi(side));
    const about = { side, title: this.comparison.title(side), limit: body.max_tokens ?? null, isJson: Boolean(body.response_format) };
    return { message: Object.assign(new Message("assistant"), { state: "streaming", ...about }), body };
  }

  /** Tell the answers that stream which parts the mesh lacks. */
  watch(missing) {
    const streaming = this.conversation.last.filter(({ state }) => state === "streaming");
    for (const message of streaming) this.views.get(message)?.waitFor(missing);
  }

  append(message) {
    this.conversation.add(message);
    this.kept.touch();
    this.list.querySelector(".empty")?.remove();
    this.show(message);
    this.list.scrollTop = this.list.scrollHeight;
  }

  show(message) {
    const view = new MessageView(message, this.actions);
    this.views.set(message, view);
    this.list.append(view.root);
  }

  grown(message) {
    const isNear = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < NEAR;
    this.views.get(message)?.show();
    if (this.views.has(message)) this.kept.touch();
    if (isNear) this.list.scrollTop = this.list.scrollHeight;
  }

  /** Answer once more in place of an answer; two side by side are compared again. */
  again(message) {
    if (this.live) return;
    const pair = this.conversation.pairOf(message);
    this.conversation.cutFrom(pair[0]);
    this.dropViews();
    this.answer(pair.length === 1 && message.side ? [message.side] : undefined);
    this.draft.focus();
  }

  edited(message, text, pictures) {
    if (this.live) return;
    Object.assign(message, { content: text, pictures });
    message.tokens = [];
    if (message.role === "user") this.conversation.cutAfter(message);
    this.dropViews();
    this.views.get(message).show();
    this.kept.touch();
    if (message.role === "user") this.answer();
  }

  /** Continue once every call of the last answers has its result. */
  answered() {
    const calling = this.conversation.last.filter(({ toolCalls }) => toolCalls.length);
    for (const message of calling) this.views.get(message)?.show();
    this.kept.touch();
    const isComplete = calling.every(({ toolCalls }) => toolCalls.every(({ result }) => result !== undefined));
    if (!this.live && calling.length && isComplete) this.answer(calling.map(({ side }) => side));
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
    const { what, questions } = aboutModel(modelName());
    this.list.replaceChildren(html("div", { class: "empty" },
      html("p", {}, "Talk to the model."),
      html("p", { class: "note" }, what),
      html("div", { class: "questions" }, ...questions.map((each) => button(each, () => {
        this.draft.value = each;
        this.send();
        this.draft.focus();
      }, { class: "button" })))));
  }
}

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
  let model;
  onMesh(() => {
    if (modelName() === model) return;
    model = modelName();
    if (!playground.conversation.messages.length) playground.showEmpty();
  });
  onMesh(({ reads_images: images, reads_sounds: sounds, missing }) => {
    playground.pictures.allow(images, sounds);
    playground.watch(missing);
  });
  byId("stop").addEventListener("click", () => playground.stop());
  byId("new-chat").addEventListener("click", () => playground.clear());
  byId("settings").addEventListener("input", () => playground.changed());
  startChats(playground.kept, (body) => playground.open(body), () => playground.clear());
  playground.restore();
  startCodeDialog(() => playground.body(), () => playground.shown());
};
