// Lists the kept conversations: search, open, export, delete.

import { byId, button, html, setText } from "../dom.js";
import { several } from "../numbers.js";
import { download, fileName, toJson, toMarkdown } from "./chat_text.js";

const day = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

const matches = ({ text }, words) => {
  const searched = text.toLowerCase();
  return words.every((word) => searched.includes(word));
};

class ChatDialog {
  /** `kept`: the KeptChat. `open`: called with the body of a conversation. `clear`: begins a new one. */
  constructor(kept, open, clear) {
    Object.assign(this, { kept, open, clear });
    this.root = byId("chats-dialog");
    this.list = byId("chats");
    this.search = byId("search-chats");
    this.heads = [];
    this.search.addEventListener("input", () => this.show());
    byId("close-chats").addEventListener("click", () => this.root.close());
    byId("export-chats").addEventListener("click", () => this.run(() => this.exportAll()));
    const removeAll = byId("delete-chats");
    removeAll.addEventListener("click", () => this.confirm(removeAll, "Delete all", this.heads.map(({ id }) => id)));
  }

  async ask() {
    this.root.showModal();
    this.search.value = "";
    this.search.focus();
    await this.run(() => this.load());
  }

  /** Run something that needs the browser's database, and say why it fails. */
  async run(action) {
    try {
      await action();
    } catch (error) {
      setText(byId("chats-note"), `This browser keeps no conversations here: ${error.message}`);
    }
  }

  async load() {
    await this.kept.flush();
    this.heads = await this.kept.store.heads();
    this.show();
  }

  show() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.heads.filter((head) => matches(head, words));
    setText(byId("chats-note"), words.length ? `${found.length} of ${several(this.heads.length, "chat")}`
      : `${several(this.heads.length, "chat")}, kept in this browser only`);
    this.list.replaceChildren(...found.map((head) => this.row(head)));
    byId("export-chats").disabled = byId("delete-chats").disabled = !this.heads.length;
  }

  row(head) {
    const isCurrent = head.id === this.kept.id;
    const remove = button("Delete", () => this.confirm(remove, "Delete", [head.id]), { title: `Delete ${head.title}` });
    return html("li", { "aria-current": isCurrent ? "true" : undefined },
      html("button", { type: "button", class: "chat", click: () => this.run(() => this.choose(head)) },
        html("b", {}, head.title), html("span", { class: "note" }, day.format(head.changed))),
      button("Export", () => this.run(() => this.exportOne(head)), { title: `Export ${head.title}` }), remove);
  }

  async choose(head) {
    const body = await this.kept.store.body(head.id);
    if (!body) return this.load(); // another tab has deleted it
    this.root.close();
    this.open(body);
  }

  async exportOne(head) {
    const body = await this.kept.store.body(head.id);
    if (body) download(fileName(head.title, "md"), "text/markdown", toMarkdown(head.title, body));
  }

  async exportAll() {
    download("tokenloom-chats.json", "application/json", toJson(this.heads, await this.kept.store.bodies()));
  }

  /** Delete at the second press of a button. */
  async confirm(pressed, text, ids) {
    if (pressed.textContent === text) {
      pressed.textContent = "Really delete?";
      pressed.addEventListener("blur", () => { pressed.textContent = text; }, { once: true });
      return;
    }
    pressed.textContent = text;
    if (ids.includes(this.kept.id)) this.clear();
    await this.kept.forget(...ids);
    await this.run(() => this.load());
    this.search.focus();
  }
}

export const startChats = (kept, open, clear) => {
  const dialog = new ChatDialog(kept, open, clear);
  byId("open-chats").addEventListener("click", () => dialog.ask());
};
