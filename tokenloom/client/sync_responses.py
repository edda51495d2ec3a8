# Generated from async_responses.py by tools/sync_client.py.
"""Reads one answer for code that blocks, over as many calls as it takes."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2

from .answer_course import AnswerCourse, NextCall
from .sync_calls import Call, CallError, error_of, sleep, was_cut

Open: TypeAlias = Callable[[NextCall, float], tuple[Call, Callable[[], object]]]
"""Makes a call with a limit in seconds; returns it, and what reports that its gateway failed."""
Cancel: TypeAlias = Callable[[inference_pb2.InferenceCancelRequest], object]
"""Ends a request at the mesh; does not wait, and may be called from ``__del__``."""


class Responses(Iterator[inference_pb2.GenerateResponse]):
    """Yields each response of an answer once. Raises any of :mod:`errors`."""

    def __init__(self, course: AnswerCourse, open_call: Open, cancel: Cancel) -> None:
        self._course = course
        self._open = open_call
        self._cancel = cancel
        self._leave_gateway: Callable[[], object] = str
        self._call: Call | None = None
        self._reading: Iterator[inference_pb2.GenerateResponse] | None = None
        self._is_closed = False
        self._has_called = False

    def __next__(self) -> inference_pb2.GenerateResponse:
        while True:
            if self._is_closed:
                raise errors.Cancelled("The request was cancelled.")
            if self._reading is None:
                self._has_called = True
                self._call, self._leave_gateway = self._open(self._course.next_call(), self._course.seconds_left)
                self._reading = iter(self._call)
            try:
                response = next(self._reading)
            except StopIteration:
                self._course.end()
                raise
            except CallError as failed:
                self._recover(failed)
            else:
                self._course.take(response)
                return response

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        # The mesh would keep the request for a while after its call.
        if self._has_called and (request := self._course.cancellation()) is not None:
            self._cancel(request)

    def __del__(self) -> None:
        self.close()  # a call is part of a cycle, and would live until that is collected

    def _recover(self, failed: CallError) -> None:
        """Wait until the next call may be made. Raises the final error."""
        error = error_of(failed)
        if self._is_closed:
            raise error from failed
        try:
            wait = self._course.failed(error, was_cut=was_cut(failed))
        except errors.TokenloomError as final:
            raise final from failed
        self._call = self._reading = None
        self._leave_gateway()
        sleep(wait)
