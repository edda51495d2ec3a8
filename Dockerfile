# Builds the images of a mesh. Targets: service (gateway, tokenizer, output processor, coordinator; without torch),
# engine-cpu and engine-cuda, which run encoders too. For example:
#   docker build --target service -t tokenloom/service .
# `--build-arg EXTRA=ray` adds Ray to an engine's image, for engines wider than a node.
# Every dependency is installed as locks/ names it, and checked against its hash. If a build cannot reach a package
# index, run `make wheels` first: it puts all required wheels into build/wheels.
ARG BASE=python:3.11.16-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

# The base of all images: user and folders.
FROM ${BASE} AS runtime
RUN echo 'tokenloom:x:10001:10001::/home/tokenloom:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'tokenloom:x:10001:' >> /etc/group \
    && mkdir -p /home/tokenloom/.cache /etc/tokenloom/tls /models /hub \
    && for part in gateway tokenizer output-processor coordinator engine encoder relay operator planner prometheus; \
       do mkdir -p "/etc/tokenloom/mesh/$part"; done \
    && chown -R 10001:10001 /home/tokenloom /etc/tokenloom /hub
ENV PATH=/opt/tokenloom/bin:$PATH HOME=/home/tokenloom PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Parts find the model of a hub id in a volume at /hub, and download nothing: `tokenloom fetch` fills the volume.
ENV HF_HUB_CACHE=/hub HF_HUB_OFFLINE=1
WORKDIR /home/tokenloom
ENTRYPOINT ["python", "-m"]

FROM ${BASE} AS service-venv
WORKDIR /src
# The second source is optional: it is a pattern, so a missing folder is not an error.
COPY locks/service.txt build/wheels/servic[e]/ /wheels/
COPY locks locks
RUN python3 -m venv /opt/tokenloom \
    && if ls /wheels/*.whl > /dev/null 2>&1; then set -- --no-index --find-links /wheels; fi \
    && /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --require-hashes "$@" \
       -r locks/build.txt -r locks/service.txt \
    && find /opt/tokenloom -depth -type d \( -name tests -o -name test \) -path '*/site-packages/numpy/*' -exec rm -rf {} +
COPY . .
RUN /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --no-index --no-deps --no-build-isolation . \
    && /opt/tokenloom/bin/python -m pip uninstall --yes pip setuptools > /dev/null

FROM runtime AS service
LABEL org.opencontainers.image.title="Tokenloom service" \
      org.opencontainers.image.description="Gateway, tokenizer, output processor and coordinator of a Tokenloom mesh" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=service-venv /opt/tokenloom /opt/tokenloom
USER 10001:10001
# docker run tokenloom/service tokenloom.services.gateway --help
CMD ["tokenloom.cli.main", "--help"]

# The compiler builds the kernels of the image, and at first use those that are not among them.
FROM runtime AS compiler
# hadolint ignore=DL3008
RUN command -v g++ > /dev/null || { apt-get update && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*; }

FROM compiler AS engine-cpu-venv
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRA=
WORKDIR /src
COPY locks/engine-cpu.txt build/wheels/engin[e]/ /wheels/
COPY locks locks
RUN python3 -m venv /opt/tokenloom \
    && if ls /wheels/*.whl > /dev/null 2>&1; then set -- --no-index --find-links /wheels; \
       else set -- --extra-index-url "$TORCH_INDEX"; fi \
    && /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --require-hashes "$@" \
       -r locks/build.txt -r locks/engine-cpu.txt ${EXTRA:+-r "locks/$EXTRA.txt"}
COPY . .
# The levels of processors, as in `tokenloom build-kernels --help`.
ARG KERNEL_LEVELS=all
RUN /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --no-index --no-deps --no-build-isolation . \
    && /opt/tokenloom/bin/tokenloom build-kernels --levels "$KERNEL_LEVELS" \
    && /opt/tokenloom/bin/python -m pip uninstall --yes pip > /dev/null

FROM compiler AS engine-cpu
LABEL org.opencontainers.image.title="Tokenloom engine for CPUs" \
      org.opencontainers.image.description="An engine or encoder of a Tokenloom mesh; computes on the CPU" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=engine-cpu-venv /opt/tokenloom /opt/tokenloom
USER 10001:10001
CMD ["tokenloom.services.engine", "--help"]

FROM ${BASE} AS engine-cuda-venv
ARG EXTRA=
WORKDIR /src
COPY locks locks
RUN python3 -m venv /opt/tokenloom \
    && /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --require-hashes \
       -r locks/build.txt -r locks/engine-cuda.txt ${EXTRA:+-r "locks/$EXTRA.txt"}
COPY . .
RUN /opt/tokenloom/bin/python -m pip install --no-cache-dir --compile --no-index --no-deps --no-build-isolation . \
    && /opt/tokenloom/bin/python -m pip uninstall --yes pip > /dev/null

# Triton compiles what launches its kernels with a C compiler when an engine starts.
FROM compiler AS engine-cuda
LABEL org.opencontainers.image.title="Tokenloom engine for GPUs" \
      org.opencontainers.image.description="An engine or encoder of a Tokenloom mesh; computes on an NVIDIA GPU" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=engine-cuda-venv /opt/tokenloom /opt/tokenloom
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Its default is ~/.triton, on a root that is mounted read-only; this folder can be written (compose, k8s), and files in
# it executed.
ENV TRITON_CACHE_DIR=/home/tokenloom/.cache/triton
USER 10001:10001
CMD ["tokenloom.services.engine", "--device", "cuda", "--help"]
