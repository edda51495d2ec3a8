"""``make containers``: builds the images, and runs them as docker-compose.yml and k8s/ say; kills parts, and asks.

The model comes from a mirror of the hub on this machine, and from a directory.
"""

import argparse
import sys

from tests.containers import compose_mesh, kube_mesh
from tests.containers.podman import build_images, podman, prepare, step
from tests.hub_mirror import HubMirror
from tokenloom.model_files.model_path import DEMO_MODEL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="run the images that the last call built")
    parser.add_argument("--only", choices=("compose", "kube"), help="run one of the two; both by default")
    arguments = parser.parse_args()
    if arguments.no_build:
        prepare()
    else:
        build_images()
    with HubMirror(DEMO_MODEL, "tokenloom/demo").serve() as mirror:
        if arguments.only != "kube":
            compose_mesh.serve_a_directory()
            compose_mesh.serve_a_hub_id(mirror)
        if arguments.only != "compose":
            kube_mesh.serve_a_hub_id(mirror)
    with step("no container is left"):
        left = podman("ps", "--all", "--quiet").split()
        assert not left, f"containers are left: {left}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
