// In a demo, a button that kills the engine that decodes, to show that answers go on.

import { call } from "../api.js";
import { button, byId } from "../dom.js";

/** Send the request that `kill_engine` of /mesh describes. Returns a text for the list of events, and its kind. */
const kill = async ({ path, header, token }) => {
  try {
    const response = await call(path.slice(1), { method: "POST", headers: { [header]: token } });
    return [`${(await response.json()).engine} was killed by the button`, "bad"];
  } catch (error) {
    return [error.message, "warn"];
  }
};

/** Shows the button as long as /mesh offers it. */
export class KillButton {
  /** `add`: receives the text of an event and its kind. */
  constructor(add) {
    this.offer = null;
    this.root = button("Kill the engine that decodes", async () => add(...await kill(this.offer)), { class: "button" });
  }

  show(offer) {
    this.offer = offer;
    if (!offer) this.root.remove();
    else if (!this.root.isConnected) byId("map").before(this.root); // moving it would take its focus
  }
}
