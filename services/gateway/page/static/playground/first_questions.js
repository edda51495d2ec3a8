// Says what a model is and what to ask it first, for the models that come with the package.

const ANY = { what: "Each answer shows where its time went. Settings hold tools, JSON schemas and log probabilities.", questions: [] };
const OURS = {
  "tokenloom-demo": {
    what: "This very small model comes with Tokenloom. It tells short stories, calculates up to 30, explains words of LLM serving, "
      + "writes JSON and calls tools. Of anything else it knows nothing.",
    questions: ["Tell me a story about a dragon.", "What is prefill?", "What is 8 + 9?",
      "Give me a JSON object with name and age for Ann, 7."],
  },
  "tokenloom-picture": { what: "This very small model comes with Tokenloom. Show it a simple drawing and ask what is in it.", questions: [] },
};

/** Return {what, questions}. `model`: its name; undefined while it is not known. */
export const aboutModel = (model) => (Object.hasOwn(OURS, model ?? "") ? OURS[model] : ANY);
