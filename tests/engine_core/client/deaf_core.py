"""A core that reads a request only after it has sent 16 MiB of outputs: run as a program in place of a real one."""

import argparse
import socket

import zmq

from tests.engine_core.helpers import make_core
from tokenloom.engine_core.data.handshake import CoreHello, CoreInit
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tokenloom.engine_core.wire.frames import Decoder, FrameReceiver, FrameSender, encode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--handshake")
    with zmq.Context() as context, context.socket(zmq.PAIR) as handshake:
        handshake.connect(parser.parse_args().handshake)
        handshake.send_multipart(encode(CoreHello(0)))
        init = Decoder(CoreInit).decode(handshake.recv_multipart())
        handshake.send_multipart(encode(make_core().ready))
        connection = socket.socket(fileno=init.connection_fd)
        sender, receiver = FrameSender(connection), FrameReceiver(connection)
        for number in range(64):
            sender.send(EngineCoreOutputs(outputs=[EngineCoreOutput(str(number), [7] * (1 << 18))]))
        receiver.receive()
        sender.send(EngineCoreOutputs(outputs=[EngineCoreOutput("last", [8], finish_reason=FinishReason.LENGTH)]))
        receiver.receive()


if __name__ == "__main__":
    main()
