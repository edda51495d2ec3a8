"""langchain-openai: a picture as a part of OpenAI's and as a block of LangChain's own, whole and streamed."""

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from shown import ANSWER, BASE64, MODEL, PART, QUESTION, URL

model = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)
block = {"type": "image", "base64": BASE64, "mime_type": "image/png"}
for picture in (PART, block):
    message = HumanMessage([picture, {"type": "text", "text": QUESTION}])
    assert model.invoke([message]).text == ANSWER
    assert "".join(piece.text for piece in model.stream([message])) == ANSWER
print("image_url and a block of LangChain's, invoke and stream")
