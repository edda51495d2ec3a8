"""Responses put together."""

import pytest

from tokenloom.client import ToolCall
from tokenloom.client.client_request import prompt_request
from tokenloom.client.results import AnswerCollector
from tokenloom.offline.outputs import Logprob
from tokenloom.v1 import inference_pb2, types_pb2


def test_samples_with_log_probabilities() -> None:
    request = prompt_request("x", {"n": 2, "logprobs": 1, "logprob_token_ids": [9], "prompt_logprobs": 0})
    assert request.return_prompt_token_ids
    collector = AnswerCollector(request)
    told = types_pb2.Logprobs(sampled=[-1.0], rank=[2], top=2, token_id=[4, 9], logprob=[-0.5, -3.0])
    prompt = types_pb2.Logprobs(sampled=[-2.0], rank=[1])
    response = inference_pb2.GenerateResponse
    collector.add(response(index=1, text="b", token_ids=[5], logprobs=told, prompt_token_ids=[7, 8]))
    collector.add(response(index=0, text="a", token_ids=[4], logprobs=told, prompt_logprobs=prompt))
    collector.add(response(index=0, finish_reason=types_pb2.FINISH_REASON_LENGTH))
    last = response(index=1, text="c", finish_reason=types_pb2.FINISH_REASON_STOP, request_id="id")
    last.usage.prompt_tokens, last.usage.cpu_ns = 2, 1_500_000
    collector.add(last)
    answer = collector.result()
    assert [output.text for output in answer.outputs] == ["a", "bc"]
    assert [output.finish_reason for output in answer.outputs] == ["length", "stop"]
    first, second = answer.outputs
    assert first.logprobs == [{4: Logprob(-1.0, 2), 9: Logprob(-3.0, None)}]
    assert second.logprobs == [{5: Logprob(-1.0, 2), 4: Logprob(-0.5, 1), 9: Logprob(-3.0, None)}]
    assert second.cumulative_logprob == pytest.approx(-1.0)
    assert answer.prompt_token_ids == [7, 8]
    assert answer.prompt_logprobs == [None, {8: Logprob(-2.0, 1)}]
    assert (answer.request_id, answer.usage.prompt_tokens, answer.usage.cpu_ms) == ("id", 2, 1.5)


def test_calls_and_reasoning() -> None:
    collector = AnswerCollector(prompt_request("x", {}))
    response = inference_pb2.GenerateResponse
    for number, pieces in enumerate(((("c1", "f", ""),), (("", "", '{"a"'),), (("", "", ": 1}"), ("c2", "g", "{}")))):
        message = response(reasoning=str(number))
        for call_id, name, arguments in pieces:
            index = 1 if call_id == "c2" else 0
            function = inference_pb2.FunctionCall(name=name, arguments=arguments)
            message.tool_calls.add(index=index, id=call_id, function=function)
        collector.add(message)
    collector.add(response(text="Yes.", finish_reason=types_pb2.FINISH_REASON_TOOL_CALLS))
    answer = collector.result()
    calls = [ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}")]
    assert answer.outputs[0].finish_reason == "tool_calls"
    assert (answer.text, answer.tool_calls) == ("Yes.", calls)
    assert answer.message == {"role": "assistant", "content": "Yes.", "tool_calls": calls, "reasoning": "012"}


def test_experts_come_with_the_end() -> None:
    collector = AnswerCollector(prompt_request("x", {"return_routed_experts": True}))
    response = inference_pb2.GenerateResponse
    collector.add(response(text="a", token_ids=[4]))
    part = types_pb2.RoutedExperts(num_layers=1, top_k=2, id_bytes=1, expert_ids=b"\x01\x02\x03\x04")
    collector.add(response(finish_reason=types_pb2.FINISH_REASON_LENGTH, routed_experts=part))
    experts = collector.result().outputs[0].routed_experts
    assert experts is not None
    assert experts.tolist() == [[[1, 2]], [[3, 4]]]
