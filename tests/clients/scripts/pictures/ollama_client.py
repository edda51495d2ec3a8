"""ollama: a picture in a chat, in a stream, in a second turn and with generate."""

import ollama
from shown import ANSWER, BASE64, FILE, MODEL, QUESTION, SECOND_ANSWER, SECOND_QUESTION, URL

GREEDY = {"temperature": 0, "num_predict": 60}
client = ollama.Client(URL)
assert "vision" in client.show(MODEL).capabilities
for picture in (str(FILE), FILE.read_bytes(), BASE64):  # the package encodes the first two
    turn = {"role": "user", "content": QUESTION, "images": [picture]}
    assert client.chat(MODEL, [turn], options=GREEDY).message.content == ANSWER
pieces = client.chat(MODEL, [turn], options=GREEDY, stream=True)
assert "".join(piece.message.content for piece in pieces) == ANSWER
conversation = [turn, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND_QUESTION}]
assert client.chat(MODEL, conversation, options=GREEDY).message.content == SECOND_ANSWER
assert client.generate(MODEL, QUESTION, images=[BASE64], options=GREEDY).response == ANSWER
try:
    client.generate(MODEL, QUESTION, images=[BASE64[:100]], options=GREEDY)
except ollama.ResponseError as error:
    assert error.status_code == 400, error
else:
    raise AssertionError("half a picture was accepted")
print("vision is named; chats from a path, bytes and base64, a stream, a second turn, generate, an error")
