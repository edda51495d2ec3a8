// Shows one message of the conversation and its actions.

import { button, html, setText } from "../dom.js";
import { pictureList } from "./pictures.js";
import { timelineOf } from "./timeline.js";
import { TokenView } from "./token_view.js";
import { toolCards } from "./tool_calls.js";

const AUTHORS = { user: "You", assistant: "Model" };

export class MessageView {
  /** `actions`: functions `regenerate`, `edited` (with the message, its new text and pictures) and `answered`. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = html("div", { class: "message-text" });
    this.reasoning = html("details", { class: "reasoning", hidden: true, open: true },
      html("summary", {}, "Reasoning"), html("div"));
    this.tools = html("div");
    this.pictures = html("ul", { class: "pictures", "aria-label": "Images and sounds" });
    this.error = html("p", { class: "problem", role: "alert", hidden: true });
    this.foot = html("div");
    this.bar = html("span", { class: "message-actions" });
    this.root = html("article", { class: `message ${message.role}`, "aria-label": AUTHORS[message.role] },
      html("header", {}, html("b", {}, AUTHORS[message.role]), this.bar),
      this.reasoning, this.pictures, this.text, this.tools, this.error, this.foot);
    this.tokens = null;
    this.showsTokens = true;
    this.show();
  }

  /** Follow the message, which may still grow. */
  show() {
    const { message } = this;
    const isLive = message.state === "streaming";
    this.root.setAttribute("aria-busy", String(isLive));
    this.root.classList.toggle("live", isLive);
    this.showPictures(message.pictures);
    this.showText();
    this.reasoning.hidden = !message.reasoning;
    setText(this.reasoning.lastChild, message.reasoning);
    if (message.toolCalls.length) this.tools.replaceChildren(...toolCards(message, this.actions.answered));
    this.error.hidden = !message.error;
    setText(this.error, message.error);
    if (isLive) {
      if (!this.bar.children.length) this.bar.replaceChildren(html("span", { class: "note" }, "streaming …"));
      return;
    }
    this.bar.replaceChildren(...this.buttons());
    if (message.role === "assistant") this.foot.replaceChildren(timelineOf(message));
  }

  showPictures(pictures, remove) {
    this.pictures.hidden = !pictures.length;
    this.pictures.replaceChildren(...pictureList(pictures, remove));
  }

  showText() {
    const { message } = this;
    const asTokens = this.showsTokens && message.tokens.length > 0;
    if (message.tokens.length && !this.tokens) {
      this.tokens = new TokenView();
      this.text.after(this.tokens.root);
    }
    this.text.hidden = asTokens || (!message.content && message.state !== "streaming");
    if (this.tokens) {
      this.tokens.root.hidden = !asTokens;
      this.tokens.show(message.tokens);
    }
    this.grow(message.content);
  }

  /** Append what is new to the text; replace it only if it is not a continuation. */
  grow(content) {
    const node = this.text.firstChild;
    if (node && content.startsWith(node.data)) node.appendData(content.slice(node.data.length));
    else this.text.replaceChildren(content);
  }

  buttons() {
    const { message, actions } = this;
    const buttons = [];
    if (message.tokens.length) {
      buttons.push(button("Tokens", () => {
        this.showsTokens = !this.showsTokens;
        this.show();
        this.bar.firstChild.focus();
      }, { "aria-pressed": String(this.showsTokens) }));
    }
    if (message.role === "assistant") buttons.push(button("Regenerate", () => actions.regenerate(message)));
    buttons.push(button("Edit", () => this.edit()));
    return buttons;
  }

  /** Replace the text by a form; a changed message of the user is sent again. */
  edit() {
    const isUser = this.message.role === "user";
    const input = html("textarea", { "aria-label": "Text of the message", rows: 3 });
    input.value = this.message.content;
    let { pictures } = this.message;
    const remove = (picture) => {
      pictures = pictures.filter((each) => each !== picture);
      this.showPictures(pictures, remove);
      input.focus();
    };
    this.showPictures(pictures, remove);
    const close = () => {
      form.replaceWith(this.text);
      this.showPictures(this.message.pictures);
      this.showText();
      this.bar.hidden = false;
      this.bar.lastChild.focus();
    };
    const form = html("form", { class: "edit", submit: (event) => {
      event.preventDefault();
      close();
      this.actions.edited(this.message, input.value, pictures);
    }, keydown: (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    } }, input, html("div", { class: "composer-row" }, button("Cancel", close),
      html("button", { class: "button primary", type: "submit" }, isUser ? "Send again" : "Save")));
    this.text.replaceWith(form);
    this.bar.hidden = true;
    input.focus();
  }
}
