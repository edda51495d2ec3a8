// Shows one message of the conversation and its actions.

import { copyButton } from "../copy.js";
import { button, html, setText } from "../dom.js";
import { MarkdownView } from "../markdown/blocks.js";
import { several } from "../numbers.js";
import { pictureList } from "./pictures.js";
import { slowLink, timelineOf } from "./timeline.js";
import { TokenView } from "./token_view.js";
import { toolCards } from "./tool_calls.js";

const AUTHORS = { user: "You", assistant: "Model" };

/** Return why the model did not come to an end by itself; empty if it did. */
const cutOf = ({ finishReason, usage, limit, numPieces }) => {
  if (finishReason === "repetition") return "Ended because the answer repeated itself.";
  if (finishReason !== "length") return "";
  const tokens = several(usage?.completion_tokens ?? numPieces, "token");
  return limit === null ? `Cut at ${tokens}: no more fit the model's limit.` : `Cut at ${tokens}, the limit in the settings.`;
};

export class MessageView {
  /** `actions`: functions `regenerate`, `edited` (with the message, its new text and pictures) and `answered`. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = html("div", { class: "message-text" });
    this.markdown = message.role === "assistant" ? new MarkdownView(this.text) : null; // users see what they wrote
    this.text.classList.toggle("markdown", Boolean(this.markdown));
    this.cut = html("p", { class: "cut", hidden: true });
    this.reasoning = html("details", { class: "reasoning", hidden: true, open: true },
      html("summary", {}, "Reasoning"), html("div"));
    this.tools = html("div");
    this.pictures = html("ul", { class: "pictures", "aria-label": "Images and sounds" });
    this.error = html("p", { class: "problem", role: "alert", hidden: true });
    this.foot = html("div");
    this.bar = html("span", { class: "message-actions" });
    const author = message.title || AUTHORS[message.role];
    const side = message.side && ` side-${message.side}`;
    this.root = html("article", { class: `message ${message.role}${side}`, "aria-label": author },
      html("header", {}, html("b", {}, author), this.bar),
      this.reasoning, this.pictures, this.text, this.tools, this.cut, this.error, this.foot);
    this.tokens = null;
    this.showsTokens = true;
    this.numSeen = 0; // pieces at the last look at the mesh
    this.missing = ""; // the part for which the answer waits
    this.show();
  }

  /** Say that the answer waits, if nothing has come since the last call. `missing`: the parts that the mesh lacks. */
  waitFor(missing) {
    const isStill = this.message.numPieces === this.numSeen;
    this.numSeen = this.message.numPieces;
    this.missing = isStill ? missing[0] ?? "" : "";
    this.showState();
  }

  showState() {
    const part = this.missing.replace("_", " ");
    const text = part ? `waiting for ${/^[aeo]/.test(part) ? "an" : "a"} ${part} …`
      : this.message.numPieces ? "streaming …" : "waiting for the first token …";
    if (this.bar.firstChild?.className !== "note") this.bar.replaceChildren(html("span", { class: "note", role: "status" }));
    setText(this.bar.firstChild, text);
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
    this.cut.hidden = isLive || !cutOf(message);
    setText(this.cut, cutOf(message));
    if (isLive) {
      if (message.numPieces !== this.numSeen) this.missing = "";
      this.showState();
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
    if (this.markdown) {
      // An answer that a schema binds is JSON, in which marks of Markdown mean nothing.
      const isJson = this.message.isJson && content;
      this.markdown.show(isJson ? `\`\`\`json\n${content}` : content, this.message.state === "streaming");
      return;
    }
    const node = this.text.firstChild;
    if (node && content.startsWith(node.data)) node.appendData(content.slice(node.data.length));
    else this.text.replaceChildren(content);
  }

  buttons() {
    const { message, actions } = this;
    const buttons = [];
    const slow = slowLink(message);
    if (message.tokens.length) {
      buttons.push(button("Tokens", () => {
        this.showsTokens = !this.showsTokens;
        this.show();
        this.bar.firstChild.focus();
      }, { "aria-pressed": String(this.showsTokens) }));
    }
    if (message.content) buttons.push(copyButton(() => message.content, message.role === "user" ? "the message" : "the answer"));
    if (message.role === "assistant") buttons.push(button("Regenerate", () => actions.regenerate(message)));
    if (slow) buttons.splice(message.tokens.length ? 1 : 0, 0, slow);
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
