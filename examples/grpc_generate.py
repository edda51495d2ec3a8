"""Generate through the public gRPC API with the package's stubs. Run ``tokenloom serve`` first."""

import argparse

import grpc

from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("prompt", nargs="?", default="What is prefix caching?")
    args = parser.parse_args()
    with grpc.insecure_channel(args.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        model = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10).models[0]
        message = inference_pb2.ChatMessage(role="user", content=args.prompt)
        request = inference_pb2.GenerateRequest(
            model=model.name,
            chat=inference_pb2.ChatPrompt(messages=[message]),
            sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=200),
        )
        for response in stub.Generate(request, timeout=60):
            print(response.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
