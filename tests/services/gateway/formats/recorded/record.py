"""Writes into ``vllm.json`` what vLLM's parsers make of its texts; needs vllm, in an environment of its own.

``python record.py DATE``, in this folder. No model and no GPU is needed: the tokenizer has a token for each mark of the
families, and otherwise one for each byte.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import vllm.version
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

RECORDED = Path(__file__).parent / "vllm.json"
MARK = re.compile(r"<[^<>\s=]{2,40}>|\[/?[A-Z_]{3,}\]|<｜[^<>｜]+｜>|functools(?=\[)")
WAYS = {"words": re.compile(r"\s?\w+|."), "characters": re.compile(".")}
MORE = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <seed:think> </seed:think> "
    "<|python_tag|> "
    "<|python_start|> <|python_end|> <|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|> "
    "<|START_ACTION|> <|END_ACTION|> <|START_TEXT|> <|END_TEXT|> <|start|> <|end|> <|message|> <|channel|> "
    "<|constrain|> <|return|> <|call|> [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK] <|tool_call|> <|tool_call> "
    '<tool_call|> <|"|> <|im_end|> <|im_start|> <|channel> <channel|> <|turn> <turn|> <escape> <｜DSML｜ '
    "<longcat_think> </longcat_think> "
    "<start_function_call> <end_function_call> </s>"
)


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {*MORE.split(), *(mark for text in texts for mark in MARK.findall(text))}
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in sorted(marks)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def pieces_of(text: str, tokenizer: Any, words: re.Pattern[str]) -> list[tuple[str, list[int]]]:
    """The text in pieces of a stream; a mark is one piece."""
    special = sorted(tokenizer.all_special_tokens + list(tokenizer.get_added_vocab()), key=len, reverse=True)
    split = re.compile("|".join(map(re.escape, special)) + f"|{words.pattern}", re.DOTALL)
    return [(piece, tokenizer.encode(piece, add_special_tokens=False)) for piece in split.findall(text)]


def answer(reasoning: str | None, content: str | None, calls: list[list[str]]) -> dict[str, Any]:
    return {"reasoning": reasoning or "", "content": content or "", "calls": calls}


def whole(parser: Any, text: str, request: Any, tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parsed = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    reasoning, content, calls = parsed
    return answer(reasoning, content, [[call.name, call.arguments] for call in calls or ()])


def streamed(parser: Any, pieces: list[tuple[str, list[int]]], request: Any) -> dict[str, Any]:
    reasoning, content, calls = "", "", list[list[str]]()
    for at, (piece, ids) in enumerate(pieces):
        delta = parser.parse_delta(piece, ids, request, [0], finished=at == len(pieces) - 1)
        if delta is None:
            continue
        reasoning, content = reasoning + (delta.reasoning or ""), content + (delta.content or "")
        for call in delta.tool_calls or ():
            while len(calls) <= call.index:
                calls.append(["", ""])
            if call.function is not None:
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
    return answer(reasoning, content, calls)


def tried(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return call()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def record(case: dict[str, Any], parsers: list[str], tools: list[Any], tokenizer: Any) -> None:
    """Add what the parsers make of a text as a whole, and of its pieces where that differs."""
    text = case["text"]
    messages = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=tools, tool_choice="auto")

    def fresh() -> Any:
        kind = ParserManager.get_parser(
            tool_parser_name=parsers[0],
            reasoning_parser_name=parsers[1] if case["kind"].startswith("reasoning") else None,
            enable_auto_tools=True,
        )
        return kind(tokenizer, request.tools)

    case["whole"] = tried(lambda: whole(fresh(), text, request, tokenizer))
    for way, words in WAYS.items():
        pieces = pieces_of(text, tokenizer, words)
        assert "".join(piece for piece, _ in pieces) == text
        case.pop(way, None)
        if (found := tried(partial(lambda cut: streamed(fresh(), cut, request), pieces))) != case["whole"]:
            case[way] = found


def main() -> None:
    recorded = json.loads(RECORDED.read_text())
    cases = recorded["cases"]
    tokenizer = tokenizer_of([case["text"] for case in cases])
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in recorded["tools"].items()
    ]
    for case in cases:
        record(case, recorded["parsers"][case["family"]], tools, tokenizer)
    head = {"vllm": vllm.version.__version__, "date": sys.argv[1]}
    head |= {"parsers": recorded["parsers"], "tools": recorded["tools"]}
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    RECORDED.write_text(f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
