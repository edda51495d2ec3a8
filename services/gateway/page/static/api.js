// Calls the gateway that has served this page.

import { readKey } from "./keys.js";

/** An answer with an error status. `status`: 0 when the gateway could not be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const describe = async (response) => {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error?.message ?? message;
  } catch { /* the body is no JSON */ }
  return new ApiError(response.status, message);
};

/** Return the response. Raises ApiError, and AbortError once `signal` is aborted. `key`: api or admin. */
export const call = async (path, { method = "GET", body, key = "api", signal, headers = {} } = {}) => {
  if (readKey(key)) headers.authorization = `Bearer ${readKey(key)}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The gateway cannot be reached.");
  }
  if (!response.ok) throw await describe(response);
  return response;
};

/** Yield the objects of a stream of server-sent events. Raises ApiError if the stream reports an error or breaks off. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection to the gateway ended before the answer did.");
    }
    if (piece.done) throw new ApiError(0, "The stream ended before the answer did.");
    const blocks = (rest + piece.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(200, event.error.message);
      yield event;
    }
  }
}
