"""Print the demo model's exact match on held-out questions by kind (greedy decoding), and samples, as Markdown."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .tools import TOOLS, Document, assistant, schema, user

ABOUT = {
    "greeting": "hello, thanks and goodbye, at times with a name to use",
    "identity": "who are you, what can you do, who made you",
    "sum": "sums up to 30",
    "difference": "differences up to 30",
    "count": "counting up and down",
    "calendar": "days and months",
    "fact": "opposites, colours, capitals",
    "glossary": "words of LLM serving",
    "json": "a JSON object with given values, also made-up names",
    "repeat": "up to 8 words to say again, also made-up ones and numbers",
    "unknown": "questions to decline",
    "story": "names its topic, comes to an end, over 40 words",
    "tool_call": "calls the right tool, also with made-up names",
    "tool_answer": "says a tool's result in words",
    "no_tool": "declines when no tool fits",
    "recall": "a name from the first turn",
    "json_new_name": "JSON with real names never trained on",
    "tool_new_city": "tool calls with real cities never trained on",
}
SAMPLES = (
    [user("Who are you?")],
    [user("What is prefill?")],
    [user("Tell me a story about a dragon.")],
    [user("Tell me a story about the lake.")],
    [user("What is 8 + 9?")],
    [user("Give me a JSON object with name and age for Ann, 7.")],
    [user("Hi, I am Laura."), assistant("Hello, Laura! How can I help you?"), user("What is my name?")],
)


class Chat:
    """A checkpoint behind transformers, in fp32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.requires_grad_(False)

    def prompt(self, messages: list[Document], tools: list[Document] | None = None) -> str:
        """The conversation as the template writes it, up to where the model speaks."""
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        return text

    @torch.inference_mode()
    def complete(self, prompts: list[str], max_new_tokens: int = 300) -> list[str]:
        """Greedy answers, run as one left-padded batch; a missing end mark shows as ``[no end]``."""
        batch = self.tokenizer(
            prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        batch.pop("token_type_ids", None)
        out = self._model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
        ends = set(self._model.generation_config.eos_token_id)
        return [self._text(row, ends) for row in out[:, batch["input_ids"].shape[1] :].tolist()]

    def _text(self, row: list[int], ends: set[int]) -> str:
        text: str = self.tokenizer.decode(row, skip_special_tokens=True)
        return text if ends & set(row) else text + " [no end]"


def expected_text(chat: Chat, document: Document) -> str:
    """The answer as the template writes it, so that a tool call is compared in its written form."""
    tools = document.get("tools")
    whole: str = chat.tokenizer.apply_chat_template(document["messages"], tools=tools, tokenize=False)
    return whole[len(chat.prompt(document["messages"][:-1], tools)) :].removesuffix("<|im_end|>\n")


def is_right(document: Document, expected: str, answer: str) -> bool:
    """Exact match; a story has no single right text (see `ABOUT`)."""
    if document["kind"] != "story":
        return answer == expected
    first_line = expected.split(". ")[0]
    topic = first_line.split(" about ")[1].split(" ", 1)[1]
    told = answer.removeprefix(first_line + ".")
    return told != answer and topic in told and not answer.endswith("[no end]") and len(told.split()) > 40


def wrong_answers(chat: Chat, documents: list[Document], batch: int) -> list[tuple[str, str, str]]:
    """(asked, wanted, got) of each question that was not answered right."""
    wrong = []
    for first in range(0, len(documents), batch):
        part = documents[first : first + batch]
        longest = 300 if part[0]["kind"] == "story" else 80
        answers = chat.complete([chat.prompt(d["messages"][:-1], d.get("tools")) for d in part], longest)
        for document, answer in zip(part, answers, strict=True):
            expected = expected_text(chat, document)
            if not is_right(document, expected, answer):
                wrong.append((document["messages"][-2]["content"], expected, answer))
    return wrong


def print_matches(chat: Chat, documents: list[Document], batch: int, show_wrong: int) -> None:
    """The table of results, and some of the wrong answers below it."""
    kinds: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        kinds[document["kind"]].append(document)
    print("| kind | right | what is asked |\n|---|---|---|")
    right, wrong = 0, []
    for kind, asked in kinds.items():
        missed = wrong_answers(chat, asked, batch)
        wrong += [(kind, *texts) for texts in missed[:show_wrong]]
        right += len(asked) - len(missed)
        print(f"| {kind} | {len(asked) - len(missed)}/{len(asked)} | {ABOUT[kind]} |", flush=True)
    print(f"| **all** | **{right}/{len(documents)}** | |\n\n## What it gets wrong\n")
    for kind, question, expected, answer in wrong:
        print(f"- {kind}: `{question}` wanted `{expected}`, got `{answer}`".replace("\n", "⏎"))


def print_samples(chat: Chat) -> None:
    """Greedy answers to `SAMPLES`, and a tool call."""
    print("\n## Samples\n")
    for messages in SAMPLES:
        print(f"- **{messages[-1]['content']}** {chat.complete([chat.prompt(messages)])[0]}")
    weather = schema(TOOLS["weather"], "get_weather", {"city": "city"})
    asked = user("How is the weather in Havana today?")
    call = chat.complete([chat.prompt([asked], [weather])])[0].replace("\n", "⏎")
    print(f"- **{asked['content']}** (with `get_weather`) `{call}`")
    print(f"- Plain text: **Once upon a time**{chat.complete(['Once upon a time'])[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl of the generator")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--show-wrong", type=int, default=1, help="wrong answers to print for each kind")
    args = parser.parse_args()
    chat = Chat(args.model)
    with open(args.heldout, encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    print("# What the demo model can do\n")
    print("Greedy decoding in fp32; exact match on questions whose wording it has not seen.\n")
    print_matches(chat, documents, args.batch, args.show_wrong)
    print_samples(chat)


if __name__ == "__main__":
    main()
