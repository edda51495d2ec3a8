"""Computes the block hashes of a request, by which its blocks are found again."""

from tokenloom.request.prompt_block_hash import hash_block

from ..scheduling.request import Request
from ..wire.embedding_rows import block_salt


def hash_next_block(request: Request, block_size: int, seed: bytes) -> None:
    """Append the hash of the first full block of a request that has none yet. ``seed``: the root of the chain.

    Embeddings salt only the blocks that hold them; the chain carries them into all later blocks.
    """
    hashes = request.block_hashes
    start = len(hashes) * block_size
    end = start + block_size
    salt = request.cache_salt
    if request.prompt_embeds:
        salt = block_salt(salt, request.prompt_embeds, start, end)
    hashes.append(hash_block(hashes[-1] if hashes else seed, request.all_token_ids[start:end], salt))
