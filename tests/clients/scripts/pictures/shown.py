"""The picture that the clients show, what they ask, and what the model answers."""

import base64
import os
from pathlib import Path

URL, MODEL = os.environ["PICTURE_URL"], os.environ["PICTURE_MODEL"]
FILE = Path(os.environ["PICTURE_FILE"])
BASE64 = base64.b64encode(FILE.read_bytes()).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
QUESTION = "What is in the picture?"
ANSWER = "There is a yellow star to the left of a blue circle."
SECOND_QUESTION = "What colour is the circle?"
SECOND_ANSWER = "The circle is blue."
PART = {"type": "image_url", "image_url": {"url": DATA_URL}}
TURN = {"role": "user", "content": [PART, {"type": "text", "text": QUESTION}]}
CONVERSATION = [TURN, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND_QUESTION}]
