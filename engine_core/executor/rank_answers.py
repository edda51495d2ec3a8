"""Joins the answers of all ranks to one call: a call that only some ranks have made is an error of its own kind."""

from collections.abc import Sequence

from ..data.errors import ExecutorFailedError, RanksDifferError, WorkerLostError


def joined_results(answers: Sequence[object | Exception]) -> list[object]:
    """Return the results by rank.

    Raises ``ValueError`` if every rank refuses the call, so that no rank has changed; ``WorkerLostError`` if a worker
    is lost; ``RanksDifferError`` if some ranks made the call and others did not; ``ExecutorFailedError`` otherwise.
    """
    errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Exception)}
    if not errors:
        return list(answers)
    for error in errors.values():
        if isinstance(error, WorkerLostError):
            raise error
    failures = [error for error in errors.values() if not isinstance(error, ValueError)]
    # When every rank refuses, nothing has changed anywhere, and the caller gets the refusal. When only some do,
    # the ranks differ, and the caller has to undo or to give the state up.
    if len(errors) == len(answers):
        raise (failures or list(errors.values()))[0]
    made = {rank: answer for rank, answer in enumerate(answers) if rank not in errors}
    reasons = "; ".join(_reason(rank, error) for rank, error in errors.items())
    text = f"{reasons}; done by {', '.join(f'worker {rank}' for rank in made)}"
    raise RanksDifferError(text, list(made.values()), is_refused=not failures)


def _reason(rank: int, error: Exception) -> str:
    is_named = isinstance(error, ExecutorFailedError) and str(error).startswith(f"worker {rank}: ")
    return str(error) if is_named else f"worker {rank}: {error}"
