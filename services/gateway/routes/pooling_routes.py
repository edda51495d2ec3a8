"""Lists the routes of embeddings, classes and scores."""

from ..http.app import Routes
from ..http.json_body import BodyParser
from ..ollama.ollama_embed import OllamaEmbedApi
from ..openai.body_reader import BodyReader
from ..pooling.pooling_api import PoolingApi
from ..pooling.pooling_endpoint import PoolingEndpoint
from ..pooling.scores import RerankApi, ScoreApi
from ..pooling.vectors import ClassifyApi, EmbeddingsApi, PoolApi
from ..serving.served_mesh import ServedMesh


def pooling_routes(mesh: ServedMesh, parser: BodyParser, reader: BodyReader, max_body_bytes: int) -> Routes:
    """Return the routes of one model. ``max_body_bytes``: limits their bodies."""
    limits = mesh.generator.limits
    score, rerank = ScoreApi(reader, limits), RerankApi(reader, limits)
    apis: dict[str, PoolingApi] = {
        "/v1/embeddings": EmbeddingsApi(reader),
        "/pooling": PoolApi(reader, limits),
        "/classify": ClassifyApi(reader, limits),
        "/score": score,
        "/v1/score": score,
        "/rerank": rerank,
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
        "/api/embed": OllamaEmbedApi(reader, is_older=False),
        "/api/embeddings": OllamaEmbedApi(reader, is_older=True),
    }
    return {
        path: {"POST": PoolingEndpoint(api, mesh.generator, mesh.models, parser, max_body_bytes)}
        for path, api in apis.items()
    }
