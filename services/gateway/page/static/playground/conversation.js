// Holds the messages of the playground.

let lastId = 0;

/** One message; an assistant's message fills while its answer streams. */
export class Message {
  constructor(role, content = "", pictures = []) {
    this.id = ++lastId;
    this.role = role; // user, assistant or tool
    this.side = ""; // of an answer in a comparison: a or b; an empty one belongs to both
    this.title = ""; // of such an answer: its side, and how that is set
    this.content = content;
    this.pictures = pictures; // of a user, and sounds: {name, url}, each a data: URL
    this.reasoning = "";
    this.toolCalls = []; // of an assistant: {id, name, arguments, result}
    this.tokens = []; // with log probabilities, if asked for: {text, logprob, alternatives}
    this.state = "done"; // done, streaming, stopped or failed
    this.error = "";
    this.finishReason = null;
    this.limit = null; // of the answer's tokens, as it was asked for; null: the model's
    this.isJson = false; // whether a schema binds the answer
    this.usage = null;
    this.timeline = null;
    this.numPieces = 0; // pieces of the stream that held output
    this.startedAt = this.firstAt = this.endedAt = 0; // milliseconds of the page's clock
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.toolCalls.length;
  }
}

export class Conversation {
  constructor() {
    this.messages = [];
  }

  /** Return a conversation that was kept; an answer that was still streaming then counts as stopped. */
  static restore(records) {
    const conversation = new Conversation();
    for (const { id, ...fields } of records) {
      const message = conversation.add(Object.assign(new Message(fields.role), fields));
      if (message.state === "streaming") message.state = "stopped";
    }
    return conversation;
  }

  add(message) {
    this.messages.push(message);
    return message;
  }

  /** Remove a message and all after it. */
  cutFrom(message) {
    this.messages.length = Math.max(this.messages.indexOf(message), 0);
  }

  /** Remove all after a message. */
  cutAfter(message) {
    this.messages.length = this.messages.indexOf(message) + 1;
  }

  /** Return the pictures of all messages. */
  get pictures() {
    return this.messages.flatMap((message) => message.pictures).filter(({ url }) => url);
  }

  /** Return the messages of one side of a comparison as the API expects them; after a comparison, side a goes on. */
  forApi(side = "") {
    const other = side === "b" ? "a" : "b";
    return this.messages.filter((message) => message.side !== other && (message.role === "user" || !message.isEmpty))
      .flatMap(apiMessages);
  }

  /** Return an answer with the one that stands beside it, if there is one. */
  pairOf(message) {
    const at = this.messages.indexOf(message);
    const first = message.side === "b" && this.messages[at - 1]?.side === "a" ? at - 1 : at;
    const isPair = this.messages[first].side === "a" && this.messages[first + 1]?.side === "b";
    return this.messages.slice(first, first + 1 + isPair);
  }

  /** Return the last answers: one, or that of each side. */
  get last() {
    const answers = this.messages.slice(this.messages.findLastIndex(({ role }) => role === "user") + 1);
    return ["", "a", "b"].map((side) => answers.findLast((message) => message.side === side)).filter(Boolean);
  }
}

const partOf = ({ url }) => (url.startsWith("data:image/")
  ? { type: "image_url", image_url: { url } }
  : { type: "audio_url", audio_url: { url } });

/** Return the content of a user's message: its text, behind its pictures and sounds if it has any. */
export const contentOf = (text, pictures) => {
  const shown = pictures.filter(({ url }) => url).map(partOf); // those too large to keep have only a name after a reload
  if (!shown.length) return text;
  return text ? [...shown, { type: "text", text }] : shown;
};

const apiMessages = (message) => {
  if (message.role === "user") return [{ role: "user", content: contentOf(message.content, message.pictures) }];
  if (!message.toolCalls.length) return [{ role: message.role, content: message.content }];
  const calls = message.toolCalls.map(({ id, name, arguments: text }) =>
    ({ id, type: "function", function: { name, arguments: text } }));
  const results = message.toolCalls.filter((call) => call.result !== undefined)
    .map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result }));
  return [{ role: "assistant", content: message.content || null, tool_calls: calls }, ...results];
};
