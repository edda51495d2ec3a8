// Keeps conversations in this browser's database, which only pages of this address can read. Nothing leaves the browser.

const VERSION = 1;
const MAX_CHATS = 200;
const MAX_BYTES = 64 << 20; // of all conversations, with their images; the oldest are dropped beyond it
const [HEADS, BODIES, VALUES] = ["heads", "bodies", "values"];

const settled = (request) => new Promise((resolve, reject) => {
  request.addEventListener("success", () => resolve(request.result));
  request.addEventListener("error", () => reject(request.error));
});

const finished = (transaction) => new Promise((resolve, reject) => {
  transaction.addEventListener("complete", () => resolve());
  transaction.addEventListener("abort", () => reject(transaction.error ?? new Error("the write was given up")));
});

const open = () => {
  const opening = indexedDB.open(`tokenloom ${location.pathname}`, VERSION); // gateways below one host keep their own
  opening.addEventListener("upgradeneeded", () => {
    for (const name of [HEADS, BODIES]) opening.result.createObjectStore(name, { keyPath: "id" });
    opening.result.createObjectStore(VALUES);
  });
  return settled(opening);
};

/** Return the ids of the oldest conversations that are too many or too large together. `id`: the one that stays. */
const surplus = (heads, id) => {
  let bytes = 0;
  return heads.toSorted((a, b) => (b.id === id) - (a.id === id) || b.changed - a.changed)
    .filter((head, index) => (bytes += head.bytes) > MAX_BYTES && index > 0 || index >= MAX_CHATS)
    .map((head) => head.id);
};

const remove = (transaction, ids) => {
  for (const name of [HEADS, BODIES]) for (const id of ids) transaction.objectStore(name).delete(id);
};

/**
 * Conversations, each with a head that lists need ({id, title, changed, bytes, text}) and a body ({id, messages, settings}).
 * Every method raises an error if the browser keeps nothing here, for example in some private windows.
 */
export class ChatStore {
  async begin(names, mode) {
    this.opening ??= open();
    return (await this.opening).transaction(names, mode);
  }

  /**
   * Keep a conversation, and drop the oldest ones that are too many. Return false, and keep nothing, if another tab has
   * written it since. `known`: when this tab wrote or read it last.
   */
  async save(head, body, known) {
    const transaction = await this.begin([HEADS, BODIES], "readwrite");
    const done = finished(transaction);
    const heads = transaction.objectStore(HEADS);
    let isOurs = true;
    const reading = heads.getAll();
    reading.addEventListener("success", () => {
      const kept = reading.result.filter(({ id }) => id !== head.id);
      isOurs = reading.result.every(({ id, changed }) => id !== head.id || changed === known);
      if (!isOurs) return;
      heads.put(head);
      transaction.objectStore(BODIES).put(body);
      remove(transaction, surplus([...kept, head], head.id));
    });
    await done;
    return isOurs;
  }

  /** Return the heads, the latest first. */
  async heads() {
    const heads = await settled((await this.begin([HEADS], "readonly")).objectStore(HEADS).getAll());
    return heads.sort((a, b) => b.changed - a.changed);
  }

  /** Return the body of a conversation; undefined if it was deleted. */
  async body(id) {
    return settled((await this.begin([BODIES], "readonly")).objectStore(BODIES).get(id));
  }

  async bodies() {
    return settled((await this.begin([BODIES], "readonly")).objectStore(BODIES).getAll());
  }

  async remove(...ids) {
    const transaction = await this.begin([HEADS, BODIES], "readwrite");
    const done = finished(transaction);
    remove(transaction, ids);
    await done;
  }

  /** Return a value that was kept under a name, such as the settings. */
  async value(name) {
    return settled((await this.begin([VALUES], "readonly")).objectStore(VALUES).get(name));
  }

  async keep(name, value) {
    const transaction = await this.begin([VALUES], "readwrite");
    const done = finished(transaction);
    transaction.objectStore(VALUES).put(value, name);
    await done;
  }
}
