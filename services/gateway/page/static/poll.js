// Asks for a JSON object again and again, while the page is visible.

import { call } from "./api.js";
import { onKeys, readKey } from "./keys.js";
import { ofModel } from "./model.js";

/** Calls `onValue` with each object, and `onError` with each ApiError. With an admin key it asks only once it has one. */
export class Poll {
  constructor(path, seconds, onValue, onError, key = "api") {
    Object.assign(this, { path, seconds, onValue, onError, key });
    this.timer = 0;
    this.turn = 0;
    document.addEventListener("visibilitychange", () => this.now());
    onKeys(() => this.now());
  }

  /** Ask at once, and then at the interval. */
  async now() {
    clearTimeout(this.timer);
    if (document.hidden || (this.key === "admin" && !readKey("admin"))) return;
    const turn = ++this.turn;
    let show;
    let isRefused = false;
    try {
      const value = await (await call(ofModel(this.path), { key: this.key })).json();
      show = () => this.onValue(value);
    } catch (error) {
      show = () => this.onError(error);
      isRefused = [401, 403, 404].includes(error.status); // asking again changes nothing until there is another key
    }
    if (turn !== this.turn) return; // a later question has been asked meanwhile
    if (!isRefused) this.timer = setTimeout(() => this.now(), 1000 * this.seconds);
    show();
  }
}
