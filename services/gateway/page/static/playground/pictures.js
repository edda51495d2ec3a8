// Holds the pictures that the next message shows: chosen, dropped or pasted, each with a button that removes it.

import { byId, button, html, setText } from "../dom.js";
import { megabytes } from "../numbers.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 20 << 20; // of a file, as encoders have it by default; a stricter gateway says so itself

/** Return pictures as a list, named by their files. `remove`: called with the one whose button is pressed; undefined: no buttons. */
export const pictureList = (pictures, remove) => pictures.map((each) => html("li", {},
  html("img", { src: each.url, alt: each.name, title: each.name }),
  remove && button("×", () => remove(each), { "aria-label": `Remove ${each.name}`, title: "Remove" })));

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve({ name: file.name, url: reader.result }));
  reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`)));
  reader.readAsDataURL(file);
});

/** Return why a file cannot be shown to the model; empty if it can. */
const problemOf = (file) => {
  if (!TYPES.includes(file.type)) return `${file.name} is no PNG, JPEG, WebP or GIF.`;
  if (file.size > MAX_BYTES) return `${file.name} has ${megabytes(file.size)}, more than ${megabytes(MAX_BYTES)}.`;
  return "";
};

export class Pictures {
  constructor() {
    this.chosen = []; // {name, url}, each a data: URL
    this.isRead = false; // whether the mesh reads images
    this.list = byId("pictures");
    this.note = byId("picture-note");
    this.input = byId("picture-files");
    this.input.addEventListener("change", async () => {
      await this.add(this.input.files);
      this.input.value = ""; // the same file may be chosen again
    });
    byId("add-pictures").addEventListener("click", () => this.input.click());
    byId("draft").addEventListener("paste", (event) => this.take(event, event.clipboardData));
    this.acceptDrops();
  }

  /** Take what is dropped anywhere: elsewhere than here, the browser would leave the page and open the file. */
  acceptDrops() {
    const mark = (isOver) => byId("playground").classList.toggle("drop", isOver);
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      mark(true);
    });
    document.addEventListener("dragleave", (event) => mark(event.relatedTarget !== null));
    document.addEventListener("drop", (event) => {
      mark(false);
      this.take(event, event.dataTransfer);
    });
  }

  /** Take the files of what was dropped or pasted; text is left to the browser. */
  take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    this.add(files);
  }

  /** Let the next message show these files, and say which cannot be shown. */
  async add(files) {
    const problems = new Set();
    for (const file of [...files]) {
      const problem = this.isRead ? problemOf(file) : "No images are read here.";
      if (problem) problems.add(problem);
      else await read(file).then((picture) => this.chosen.push(picture), (error) => problems.add(error.message));
    }
    setText(this.note, [...problems].join(" "));
    this.show();
    byId("draft").focus();
  }

  remove(picture) {
    this.chosen = this.chosen.filter((each) => each !== picture);
    this.show();
    (this.list.querySelector("button") ?? byId("draft")).focus();
  }

  /** Return the pictures, which belong to a message from now on. */
  release() {
    const { chosen } = this;
    this.chosen = [];
    setText(this.note, "");
    this.show();
    return chosen;
  }

  show() {
    this.list.hidden = !this.chosen.length;
    this.list.replaceChildren(...pictureList(this.chosen, (each) => this.remove(each)));
  }

  /** Offer images only if the mesh reads them. */
  allow(isRead) {
    this.isRead = isRead;
    byId("add-pictures").hidden = !isRead;
  }
}
