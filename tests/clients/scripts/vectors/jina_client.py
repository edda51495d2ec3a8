"""llama-index: JinaRerank sorts the nodes of a query."""

import os

from answers import QUESTIONS, TEXTS
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.jinaai_rerank import JinaRerank

rerank = JinaRerank(
    top_n=2, model=os.environ["TOKENLOOM_MODEL"], base_url=os.environ["TOKENLOOM_URL"] + "/v1", api_key="none"
)
nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
for question, text in zip(QUESTIONS, TEXTS, strict=True):
    best, second = rerank.postprocess_nodes(nodes, query_str=question)
    assert best.node.get_content() == text
    assert best.score > second.score
print(f"{len(QUESTIONS)} queries over {len(TEXTS)} nodes, the answer first")
