// Prints schemas as zod writes them: for the AI SDK and OpenAI's helpers (2020-12), and for MCP servers in TypeScript
// (draft 7). Needs zod.
import { z } from "zod";

const person = z.object({ name: z.string().min(1), email: z.email().optional(), age: z.int().min(0).max(150).nullable() });
const category = z.object({ name: z.string(), get children() { return z.array(category); } });
const shape = z.discriminatedUnion("kind", [
  z.object({ kind: z.literal("circle"), radius: z.number().positive() }),
  z.object({ kind: z.literal("square"), side: z.number().positive() }),
]);
const fields = {
  string: z.string(), min_max: z.string().min(2).max(40), length: z.string().length(8), regex: z.string().regex(/^[a-z]+$/i),
  starts: z.string().startsWith("sk-"), ends: z.string().endsWith(".md"), includes: z.string().includes("@"),
  email: z.email(), uuid: z.uuid(), uuidv4: z.uuidv4(), guid: z.guid(), cuid: z.cuid(), cuid2: z.cuid2(), ulid: z.ulid(),
  nanoid: z.nanoid(), url: z.url(), emoji: z.emoji(), base64: z.base64(), base64url: z.base64url(), jwt: z.jwt(),
  ipv4: z.ipv4(), ipv6: z.ipv6(), cidrv4: z.cidrv4(), cidrv6: z.cidrv6(), e164: z.e164(), hostname: z.hostname(),
  iso_date: z.iso.date(), iso_time: z.iso.time(), iso_datetime: z.iso.datetime(), iso_duration: z.iso.duration(),
  offset_datetime: z.iso.datetime({ offset: true }), number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(),
  float32: z.float32(), positive: z.number().positive(), between: z.number().gt(0).lt(1), multiple: z.number().multipleOf(0.5),
  boolean: z.boolean(), nothing: z.null(), any: z.any(), unknown: z.unknown(), never_optional: z.never().optional(),
  literal: z.literal("yes"), literals: z.literal(["a", 2, true]), enumeration: z.enum(["low", "high"]),
  array: z.array(z.string()), bounded_array: z.array(z.number()).min(1).max(4), non_empty: z.array(z.boolean()).nonempty(),
  tuple: z.tuple([z.string(), z.number()]), tuple_rest: z.tuple([z.string()], z.number()),
  record: z.record(z.string(), z.number()), record_enum: z.record(z.enum(["a", "b"]), z.number()),
  partial_record: z.partialRecord(z.enum(["a", "b"]), z.string()), record_regex: z.record(z.string().regex(/^x-/), z.string()),
  record_of_objects: z.record(z.string(), person), union: z.union([z.string(), z.number()]),
  nullable: z.string().nullable(), nullish: z.number().nullish(), optional: z.string().optional(), with_default: z.string().default("x"),
  described: z.string().describe("What to look for."), intersection: z.intersection(person, z.object({ role: z.string() })),
  extended: person.extend({ role: z.enum(["admin", "user"]) }), picked: person.pick({ name: true }), partial: person.partial(),
  strict: z.strictObject({ a: z.string() }), loose: z.looseObject({ a: z.string() }), catchall: z.object({ a: z.string() }).catchall(z.number()),
  nested: z.object({ people: z.array(person), owner: person }), shape, shapes: z.array(shape), category, json: z.json(),
  template: z.templateLiteral(["item-", z.number()]), readonly: z.array(z.string()).readonly(), branded: z.string().brand("Id"),
  password: z.string().regex(/^(?=.*[A-Z])(?=.*\d).{8,}$/), slug: z.string().regex(/^[a-z0-9]+(?:-[a-z0-9]+)*$/),
};
const tools = {
  search: z.object({ query: z.string().describe("What to look for."), limit: z.int().min(1).max(50).default(10), site: z.url().optional() }),
  edit_file: z.object({ path: z.string(), edits: z.array(z.object({ old: z.string(), new: z.string() })).min(1), dry_run: z.boolean().default(false) }),
  read_files: z.object({ paths: z.array(z.string()).min(1), head: z.number().optional(), tail: z.number().optional() }),
  create_issue: z.object({ owner: z.string(), repo: z.string(), title: z.string().max(256), labels: z.array(z.string()).optional(), milestone: z.int().nullable() }),
  send_message: z.object({ channel: z.string().regex(/^[CG][A-Z0-9]{8,}$/), text: z.string(), thread: z.string().optional(), when: z.iso.datetime().optional() }),
  query_database: z.object({ sql: z.string(), params: z.array(z.union([z.string(), z.number(), z.boolean(), z.null()])), timeout: z.int().positive().default(30) }),
  create_event: z.object({ title: z.string(), start: z.iso.datetime({ offset: true }), end: z.iso.datetime({ offset: true }), guests: z.array(z.email()).max(20), repeat: z.enum(["daily", "weekly"]).optional() }),
  set_variables: z.object({ scope: z.enum(["user", "project"]), values: z.record(z.string(), z.union([z.string(), z.number()])) }),
  draw: z.object({ shapes: z.array(shape).min(1), size: z.tuple([z.int(), z.int()]), color: z.string().regex(/^#[0-9a-f]{6}$/i).default("#000000") }),
  think: z.object({ thought: z.string(), next_needed: z.boolean(), number: z.int().min(1), total: z.int().min(1), revises: z.int().optional() }),
  remember: z.object({ entities: z.array(z.object({ name: z.string(), type: z.string(), observations: z.array(z.string()) })) }),
  fetch: z.object({ url: z.url(), method: z.enum(["GET", "POST"]).default("GET"), headers: z.record(z.string(), z.string()).optional(), body: z.json().optional() }),
};
const show = (name, schema, target, from) => {
  const options = target === "draft-7" ? { target, io: "input" } : { target };
  console.log(JSON.stringify({ from, name, schema: z.toJSONSchema(schema, options) }));
};
for (const [name, field] of Object.entries(fields)) show(name, z.object({ value: field }), "draft-2020-12", "zod");
for (const [name, tool] of Object.entries(tools)) show(name, tool, "draft-7", "MCP server in TypeScript");
