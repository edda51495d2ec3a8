// Makes the body of a chat completion from the settings and the conversation.

/** Return the fields that a program would send. Fields at their default are left out. */
export const requestBody = (settings, messages, model) => {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const body = { model, messages: [...system, ...messages], stream: true };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
    if (settings[name] !== null) body[name] = settings[name];
  }
  if (settings.alternatives !== null) Object.assign(body, { logprobs: true, top_logprobs: settings.alternatives });
  if (settings.tools) Object.assign(body, { tools: settings.tools, tool_choice: settings.toolChoice });
  if (settings.schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: settings.schema, strict: true } };
  }
  return body;
};

/** Return the body with what only the page needs: the tokens of the answer and its timeline. */
export const measured = (body) => ({ ...body, return_timeline: true, stream_options: { include_usage: true } });
