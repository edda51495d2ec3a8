"""Names the platforms on which Tokenloom is tested."""

import platform
import sys

TESTED = "Linux on x86-64"
ALSO_BUILT = "Linux on aarch64"


def platform_note() -> str:
    """Return one sentence for a user of another platform; empty: the platform is a tested one."""
    machine = platform.machine()
    if sys.platform == "linux" and machine == "x86_64":
        return ""
    if sys.platform == "linux" and machine == "aarch64":
        return f"{ALSO_BUILT} has built kernels but is not tested: please compare answers with {TESTED}."
    return (
        f"{platform.system()} on {machine} is not a tested platform ({TESTED} is): parts may fail to start; use the "
        "container images instead."
    )
