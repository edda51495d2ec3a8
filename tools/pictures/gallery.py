"""Lists the pictures of the documentation."""

from . import failures, kv_transfer, mesh, request_life, scheduler_step

PICTURES = {
    "mesh": mesh.draw,
    "request": request_life.draw,
    "kv-transfer": kv_transfer.draw,
    "failures": failures.draw,
    "step": scheduler_step.draw,
}
"""File name in ``docs/pictures``, without its suffix, and what draws it."""
