"""Runs a coordinator that competes for a Lease of a server on this machine.

``python -m tokenloom.bench.scale.takeover.leased_coordinator ACCOUNT PORT --listen …``; see :func:`.make_account`. In a
cluster the files and the name of the API server are always the same, so that the coordinator has no flags for them.
"""

import os
import sys
from pathlib import Path

from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.lease import KubernetesLease
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.runtime.host.service import main

from .lease_server import local_api


def run(account: Path, port: int) -> int:
    """Run the process; return its exit status."""
    lease = KubernetesLease(local_api(account, port), "coordinator", f"coordinator-{os.getpid()}")
    return main(lambda settings: CoordinatorService(settings, lease), CoordinatorSettings, CoordinatorSettings.service)


if __name__ == "__main__":
    account, port = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
    sys.exit(run(account, port))
