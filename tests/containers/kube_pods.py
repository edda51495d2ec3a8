"""Pods of the manifests in k8s/, as ``podman kube play`` can run them on one machine.

podman knows neither StatefulSets nor Jobs, gives pods no addresses of their own here, and has no Services. So each
replica becomes a Pod with an address of the loopback network, and addresses replace the names of Services in settings.
Containers, images, arguments, settings, volumes, resources and security contexts stay as they are; Secrets are folders.
There is no API server and therefore no Lease: one coordinator runs, and it is active.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

from tools.helm_chart import Objects

NAMES = "127.0.1."
"""Prefix of the pods' addresses."""
_PROBES = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle")
"""The kubelet runs these; podman has no gRPC probes."""

_SERVICE = re.compile(r"(?:dns:///)?([a-z-]+):(\d+)")

Pod = dict[str, Any]


def replica_names(objects: Objects) -> list[str]:
    """Return the name of each pod that the workloads ask for, such as ``engine-0``."""
    return [
        f"{each['metadata']['name']}-{index}"
        for each in objects.values()
        if each["kind"] in ("Deployment", "StatefulSet")
        for index in range(1 if each["metadata"]["name"] == "coordinator" else each["spec"]["replicas"])
    ]


def address_of(pod: str, pods: list[str]) -> str:
    """Return the address of a pod; ``pods`` are all that will ever run."""
    return f"{NAMES}{pods.index(pod) + 1}"


def make_pod(objects: Objects, pod: str, pods: list[str], secrets: Path) -> Pod:
    """Return the pod of a workload, or of a Job, under its own address.

    Args:
        secrets: Holds a folder for each Secret; podman 4.3 cannot mount Secrets by their names.
    """
    name = pod.rpartition("-")[0]
    (workload,) = (
        each
        for each in objects.values()
        if each["metadata"]["name"] == name and each["kind"] in ("Deployment", "StatefulSet", "Job")
    )
    spec = copy.deepcopy(workload["spec"]["template"]["spec"])
    api_access = {volume["name"] for volume in spec["volumes"] if "projected" in volume}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] not in api_access]
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        for probe in _PROBES:
            container.pop(probe, None)
        container.pop("ports", None)  # podman maps none on the network of the machine
        container["env"] = _environment(objects, container, pod, pods)
        container.pop("envFrom", None)
        container["args"] = _expanded(container)
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] not in api_access]
    for volume in spec["volumes"]:
        if (secret := volume.pop("secret", None)) is not None:
            volume["hostPath"] = {"path": str(secrets / secret["secretName"]), "type": "Directory"}
    spec["hostNetwork"] = True
    spec["restartPolicy"] = "OnFailure"  # with Always, podman would also restart an init container that has ended
    for field in ("topologySpreadConstraints", "serviceAccountName"):
        spec.pop(field, None)
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "labels": labels}, "spec": spec}


def _environment(objects: Objects, container: dict[str, Any], pod: str, pods: list[str]) -> list[dict[str, str]]:
    """Return the container's variables, those of ConfigMaps included, with what the cluster would fill in."""
    address = address_of(pod, pods)
    values: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        values |= objects[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
    fields = {"metadata.name": pod, "status.podIP": address}
    for entry in container.get("env", ()):
        if entry["name"] == "TOKENLOOM_LEASE":
            continue
        value = entry.get("value")
        values[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else value
    filled = {name: value.replace("$(POD_IP)", address).replace("0.0.0.0", address) for name, value in values.items()}
    return [{"name": name, "value": _resolved(value, pods)} for name, value in filled.items()]


def _expanded(container: dict[str, Any]) -> list[str]:
    """Return the arguments with the values of ``$(NAME)``, which the kubelet fills in and podman does not."""
    arguments = list(container["args"])
    for entry in container["env"]:
        arguments = [argument.replace(f"$({entry['name']})", entry["value"]) for argument in arguments]
    return arguments


def _resolved(value: str, pods: list[str]) -> str:
    """Return the addresses of all pods behind ``NAME:PORT``, which DNS would give; other values as they are."""
    match = _SERVICE.fullmatch(value)
    found = [address_of(each, pods) for each in pods if match is not None and each.rpartition("-")[0] == match[1]]
    return ",".join(f"{address}:{match[2]}" for address in found) if match is not None and found else value


def to_text(*objects: dict[str, Any]) -> str:
    """Return a file for ``podman kube play``; JSON is YAML."""
    return "\n---\n".join(json.dumps(each) for each in objects) + "\n"
