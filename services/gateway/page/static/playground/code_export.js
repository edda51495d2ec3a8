// Writes a request as a command or a program. Keys are named by a variable, never written.

const KEY = "TOKENLOOM_API_KEY";
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return a curl command. `base`: the URL of the API. `hasKey`: whether the gateway asks for a key. */
export const toCurl = (body, base, hasKey) => [
  `curl -N ${base}/chat/completions`,
  ...(hasKey ? [`  -H "Authorization: Bearer $${KEY}"`] : []),
  "  -H 'Content-Type: application/json'",
  `  -d ${quoted(JSON.stringify(body, null, 2))}`,
].join(" \\\n");

const literal = (value, indent) => {
  const inner = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((each) => `${inner}${literal(each, inner)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const members = Object.entries(value).map(([name, each]) =>
      `${inner}${JSON.stringify(name)}: ${literal(each, inner)},\n`);
    return members.length ? `{\n${members.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value); // a number, or a string, which Python escapes as JSON does
};

/** Return a program for OpenAI's client. Arguments as for `toCurl`. */
export const toPython = (body, base, hasKey) => {
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  const key = hasKey ? `os.environ["${KEY}"]` : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})
stream = client.chat.completions.create(
${fields})
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
`;
};
