"""The sampling rule written the plain way: one full sort, one loop over the vocabulary."""

from collections import Counter

import numpy as np

from tokenloom.engine_core.data.core_params import CoreSamplingParams


def penalized(logits, params: CoreSamplingParams, prompt, output):
    row = np.array(logits, dtype=np.float64)
    counts = Counter(output)
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row.astype(np.float32)


def probabilities(logits, params: CoreSamplingParams):
    """[vocab] float64; zero for what the filters cut."""
    row = np.array(logits, dtype=np.float64)
    result = np.zeros(len(row))
    if params.temperature == 0.0:
        result[np.argmax(row)] = 1.0
        return result
    weights = np.exp((row - row.max()) / params.temperature)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = [token for token in order if weights[token] >= params.min_p]
    if params.top_k:
        order = order[: params.top_k]
    total, mass, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if params.top_p < 1.0 and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    result[kept] = weights[kept] / mass
    return result


def draw(distribution, u: float) -> int:
    mass = 0.0
    for token, probability in enumerate(distribution):
        mass += probability
        if mass > u:
            return token
    return int(np.flatnonzero(distribution)[-1])
