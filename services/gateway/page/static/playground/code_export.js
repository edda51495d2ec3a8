// Writes a request as a command or a program. Keys are named by a variable, and images by their files, never written.

const KEY = "TOKENLOOM_API_KEY";
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const headOf = (url) => url.slice(0, url.indexOf(",") + 1); // "data:image/png;base64,"

/** Return what a shell reads as the body, from a pipe: an argument holds 128 KiB, and an image has more. */
const withFiles = (body, pictures) => {
  let text = JSON.stringify(body, null, 2).replaceAll(/[\\$`]/g, "\\$&");
  for (const { name, url } of pictures) {
    text = text.replaceAll(url, () => `${headOf(url)}$(base64 < ${quoted(name)} | tr -d '\\n')`);
  }
  return `  -d @- <<END\n${text}\nEND`;
};

/**
 * Return a curl command.
 * `base`: the URL of the API. `hasKey`: whether the gateway asks for a key. `pictures`: those of the body, {name, url}.
 */
export const toCurl = (body, base, hasKey, pictures) => [
  `curl -N ${base}/chat/completions`,
  ...(hasKey ? [`  -H "Authorization: Bearer $${KEY}"`] : []),
  "  -H 'Content-Type: application/json'",
  pictures.length ? withFiles(body, pictures) : `  -d ${quoted(JSON.stringify(body, null, 2))}`,
].join(" \\\n");

const ENCODED = `

def encoded(path):
    return base64.b64encode(Path(path).read_bytes()).decode()

`;

const literal = (value, indent, named) => {
  const inner = `${indent}    `;
  if (named.has(value)) return `${JSON.stringify(headOf(value))} + encoded(${JSON.stringify(named.get(value))})`;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((each) => `${inner}${literal(each, inner, named)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const members = Object.entries(value).map(([name, each]) =>
      `${inner}${JSON.stringify(name)}: ${literal(each, inner, named)},\n`);
    return members.length ? `{\n${members.join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value); // a number, or a string, which Python escapes as JSON does
};

/** Return a program for OpenAI's client. Arguments as for `toCurl`. */
export const toPython = (body, base, hasKey, pictures) => {
  const named = new Map(pictures.map(({ name, url }) => [url, name]));
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value, "    ", named)},\n`).join("");
  const imports = [...(named.size ? ["base64"] : []), ...(hasKey ? ["os"] : [])].map((each) => `import ${each}\n`).join("");
  const key = hasKey ? `os.environ["${KEY}"]` : '"none"';
  return `${imports}${named.size ? "from pathlib import Path\n" : ""}${imports && "\n"}from openai import OpenAI
${named.size ? ENCODED : ""}
client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})
stream = client.chat.completions.create(
${fields})
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
`;
};
