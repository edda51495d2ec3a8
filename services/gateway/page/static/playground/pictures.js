// Holds the pictures that the next message shows, or the sounds that it plays: chosen, dropped or pasted, each with a button
// that removes it.

import { byId, button, html, setText } from "../dom.js";
import { megabytes } from "../numbers.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 20 << 20; // of a file, as encoders have it by default; a stricter gateway says so itself

const shown = ({ name, url }) => (!url ? html("span", { class: "note" }, `${name} (too large to be kept)`) : url.startsWith("data:image/")
  ? html("img", { src: url, alt: name, title: name })
  : html("audio", { src: url, controls: true, "aria-label": name, title: name }));

/** Return pictures and sounds as a list, named by their files. `remove`: called with the one whose button is pressed; undefined: no buttons. */
export const pictureList = (pictures, remove) => pictures.map((each) => html("li", {},
  shown(each),
  remove && button("×", () => remove(each), { "aria-label": `Remove ${each.name}`, title: "Remove" })));

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve({ name: file.name, url: reader.result }));
  reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read: ${reader.error.message}`)));
  reader.readAsDataURL(file);
});

/** Return why a file cannot be shown to the model; empty if it can. `types`: what the model reads. */
const problemOf = (file, types) => {
  const isSound = types.includes("audio/*") && file.type.startsWith("audio/");
  if (!isSound && !types.includes(file.type)) {
    const wanted = [...(types.includes(IMAGES[0]) ? ["PNG, JPEG, WebP or GIF"] : []), ...(types.includes("audio/*") ? ["sound"] : [])];
    return `${file.name} is no ${wanted.join(" and no ")}.`;
  }
  if (file.size > MAX_BYTES) return `${file.name} has ${megabytes(file.size)}, more than ${megabytes(MAX_BYTES)}.`;
  return "";
};

export class Pictures {
  constructor() {
    this.chosen = []; // {name, url}, each a data: URL
    this.types = []; // of the files that the mesh reads
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
      const problem = this.types.length ? problemOf(file, this.types) : "No images and no sounds are read here.";
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

  /** Offer images and sounds only if the mesh reads them. */
  allow(images, sounds) {
    this.types = [...(images ? IMAGES : []), ...(sounds ? ["audio/*"] : [])];
    this.input.accept = this.types.join(",");
    const add = byId("add-pictures");
    add.hidden = !this.types.length;
    setText(add, images && sounds ? "Files" : sounds ? "Sounds" : "Images");
  }
}
