"""tritonclient over gRPC: health, metadata, inference, streams, errors."""

import os
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = os.environ["TOKENLOOM_MODEL"]


def inputs(*texts: str, **flags: bool) -> list[Any]:
    tensor = triton.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    found = [tensor]
    for name, value in flags.items():
        found.append(triton.InferInput(name, [1], "BOOL"))
        found[-1].set_data_from_numpy(np.array([value]))
    return found


def main() -> None:
    client = triton.InferenceServerClient(os.environ["TOKENLOOM_GRPC"])
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert not client.is_model_ready("other")
    assert client.get_server_metadata().name == "tokenloom"
    metadata = client.get_model_metadata(MODEL)
    assert metadata.inputs[0].name == "text_input"
    parameters = {"max_tokens": 20, "temperature": 0.0}
    answer = client.infer(MODEL, inputs("Once upon", "The"), parameters=parameters, request_id="7")
    texts = [text.decode() for text in answer.as_numpy("text_output")]
    assert len(texts) == 2
    assert all(texts)
    assert answer.get_response().id == "7"
    with_prompt = client.infer(MODEL, inputs("Once upon", exclude_input_in_output=False), parameters=parameters)
    assert with_prompt.as_numpy("text_output")[0].decode() == "Once upon" + texts[0]
    assert streamed(client, parameters) == texts[0]
    try:
        client.infer(MODEL, inputs("x"), parameters={"temperature": -1.0})
    except InferenceServerException as error:
        assert "temperature" in error.message()
        print("health, metadata, infer, a stream, errors")
        return
    raise AssertionError("a temperature of -1 was taken")


def streamed(client: Any, parameters: dict[str, object]) -> str:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    asking = inputs("Once upon", stream=True)
    client.async_stream_infer(MODEL, asking, parameters=parameters, enable_empty_final_response=True)
    text = ""
    while True:
        result, error = answers.get(timeout=30)
        assert error is None, error
        text += result.as_numpy("text_output")[0].decode()
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    return text


if __name__ == "__main__":
    main()
