// Says which states of parts are good.

const BAD = ["lost", "dead"];

export const isBad = (state) => BAD.includes(state);
export const isWell = (state) => state === "serving";

/** Return ok, warn or bad. */
export const levelOf = (state) => (isWell(state) ? "ok" : isBad(state) ? "bad" : "warn");
