// @langchain/openai: a task with a tool to its end, whole and streamed, its error of the context, errors.
import assert from "node:assert/strict";
import { AIMessage, HumanMessage, ToolMessage } from "@langchain/core/messages";
import { ContextOverflowError } from "@langchain/core/errors";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const weather = tool(({ city }) => (assert.equal(city, "Oslo"), "It rains."), {
  name: "get_weather",
  description: "Says the weather of a city.",
  schema: z.object({ city: z.string() }),
});

const chat = (prefix, options = {}) =>
  new ChatOpenAI({
    model: process.env[`${prefix}_MODEL`],
    apiKey: "none",
    maxRetries: 0,
    configuration: { baseURL: `${process.env[`${prefix}_URL`]}/v1` },
    ...options,
  });

const question = new HumanMessage("What is the weather in Oslo?");
const withTool = chat("SCRIPTED").bindTools([weather]);
const said = await withTool.invoke([question]);
const result = await weather.invoke(said.tool_calls[0]);
assert(result instanceof ToolMessage);
assert.match((await withTool.invoke([question, said, result])).text, /It rains/);
let whole;
for await (const piece of await withTool.stream([question])) whole = whole === undefined ? piece : whole.concat(piece);
assert.deepEqual(whole.tool_calls[0].args, { city: "Oslo" });

// A call that maxTokens has cut is history like others.
const forced = chat("TOKENLOOM", { maxTokens: 12 }).bindTools([weather], { tool_choice: "get_weather" });
const cut = await forced.invoke([question]);
await chat("TOKENLOOM", { maxTokens: 12 }).invoke([question, cut, new AIMessage("It failed."), new HumanMessage("And now?")]);

const long = "word ".repeat(4000);
const faults = [
  ["context too long", chat("TOKENLOOM"), long, (error) => ContextOverflowError.isInstance(error)],
  ["unknown model", chat("TOKENLOOM", { model: "none-such" }), "x", (error) => error.lc_error_code === "MODEL_NOT_FOUND"],
  ["bad field", chat("TOKENLOOM", { temperature: -1 }), "x", (error) => error.status === 400],
  ["rate limit", chat("SCRIPTED"), "Answer that I ask too often.", (error) => error.lc_error_code === "MODEL_RATE_LIMIT"],
  ["503", chat("SCRIPTED"), "Answer that nothing serves.", (error) => error.status === 503],
  ["timeout", chat("SCRIPTED", { timeout: 1000 }), "Never answer.", (error) => error.name === "TimeoutError"],
];
for (const [name, model, text, isKnown] of faults) {
  const error = await model.invoke(text).then(() => undefined, (error) => error);
  assert(error !== undefined && isKnown(error), `${name}: ${error?.name} ${error?.lc_error_code}: ${error}`);
}
console.log("a task with a tool, whole and streamed; history with a call that was cut; all kinds of errors");
