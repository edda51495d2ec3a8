"""Lists the routes of embeddings, classes and scores."""

from ..http.json_body import BodyParser
from ..http.route import Route, Routes
from ..ollama.ollama_embed import OllamaEmbedApi
from ..openai.body_reader import BodyReader
from ..openapi import route_table
from ..pooling.pooling_api import PoolingApi, PoolingEndpoint
from ..pooling.scores import RerankApi, ScoreApi
from ..pooling.vectors import ClassifyApi, EmbeddingsApi, PoolApi
from ..serving.served_mesh import ServedMesh


def pooling_routes(mesh: ServedMesh, parser: BodyParser, reader: BodyReader, max_body_bytes: int) -> Routes:
    """Return the routes of one model. ``max_body_bytes``: limits their bodies."""
    limits = mesh.generator.limits
    score, rerank = ScoreApi(reader, limits), RerankApi(reader, limits)
    apis: dict[Route, PoolingApi] = {
        route_table.EMBEDDINGS: EmbeddingsApi(reader),
        route_table.POOLING: PoolApi(reader, limits),
        route_table.CLASSIFY: ClassifyApi(reader, limits),
        **dict.fromkeys(route_table.SCORES, score),
        **dict.fromkeys(route_table.RERANKS, rerank),
        route_table.OLLAMA_EMBED: OllamaEmbedApi(reader, is_older=False),
        route_table.OLLAMA_EMBEDDINGS: OllamaEmbedApi(reader, is_older=True),
    }
    return {
        route: PoolingEndpoint(api, mesh.generator, mesh.models, parser, max_body_bytes) for route, api in apis.items()
    }
