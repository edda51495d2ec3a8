.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(shell cd protos && find tokenloom -name '*.proto' | sort)
PROTOC := PATH=$(CURDIR)/$(BIN):$$PATH python -m grpc_tools.protoc -I .
# Where pip finds torch; empty: the default index. PyTorch's public CPU index serves machines that would otherwise draw CUDA.
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
export HF_HUB_OFFLINE ?= 1

install: .venv/.installed ## create .venv with the package (editable), the development tools and the test references

.venv/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a minute or two, log in .venv/install.log) …"
	@{ $(INSTALL); } > .venv/install.log 2>&1 || { cat .venv/install.log; exit 1; }
	@touch $@

# nixl is for the tests of that transport; its own requirements would draw CUDA, and host memory needs none of them.
define INSTALL
$(BIN)/pip install --upgrade pip \
	&& $(BIN)/pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION) \
	&& $(BIN)/pip install --editable '.[engine,dev]' \
	&& $(BIN)/pip install --no-deps 'nixl>=1.5' 'nixl-cu12>=1.5'
endef

demo: install ## start the whole mesh, chat once through it, show where the time went, stop everything
	@$(BIN)/tokenloom demo

test: install ## all tests: no GPU, no network
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

soak: install ## a thousand random schedules of faults while KV moves between engines; 300 random JSON schemas; grammars meant to hurt; nonsense over HTTP and gRPC
	$(BIN)/python -m tests.soak --schedules 1000
	$(BIN)/python -m tests.soak --schedules 50 --worker model
	$(BIN)/python -m tests.soak.schemas --schemas 300
	$(BIN)/python -m tests.soak.bombs
	$(BIN)/python -m tests.soak.fuzz --requests 20000

bench: install ## the short benchmarks: the mesh alone, a step's parts, the offline engine, each in seconds
	$(BIN)/tokenloom bench mesh --step-ms 20 --step-ms 0 --batch 64 --seconds 5
	$(BIN)/tokenloom bench step --batch 1 --batch 8 --steps 32
	$(BIN)/tokenloom bench throughput --num-prompts 64

gpu-check: install ## on a machine with a GPU: parity and a table of throughput, nothing to download; elsewhere one line
	$(BIN)/python -m tests.gpu_check

lint: install ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## mypy --strict
	$(BIN)/mypy -p tokenloom

protos: install ## regenerate the client stubs beside the .proto files
	cd protos && $(PROTOC) --python_out=. --grpc_python_out=. --pyi_out=. --mypy_grpc_out=quiet:. $(PROTOS)

check-protos: install ## fail if the committed stubs are stale
	@rm -rf build/protos && mkdir -p build/protos
	@cd protos && $(PROTOC) --python_out=../build/protos --grpc_python_out=../build/protos --pyi_out=../build/protos --mypy_grpc_out=quiet:../build/protos $(PROTOS)
	@cd build/protos && for f in $$(find . -name '*.py*'); do cmp $$f ../../protos/$$f || exit 1; done

lint-protos: ## buf lint (through npx: Node.js)
	cd protos && npx --yes @bufbuild/buf@1.75.0 lint

docs: install ## write the pages of docs/ that come from the code
	$(BIN)/python -m tokenloom.reference docs

wheels: install ## the package and all that it needs as wheels in build/wheels, for image builds that reach no index
	@rm -rf build/wheels && mkdir -p build/wheels
	$(BIN)/pip wheel --quiet --wheel-dir build/wheels/service .
	$(BIN)/pip wheel --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --wheel-dir build/wheels/engine torch==$(TORCH_VERSION) '.[engine]'

containers: install ## build the images, run docker-compose.yml with podman, kill parts of it (as root, on Debian)
	$(BIN)/python -m tests.containers.run

metrics-docs: install ## write docs/metrics.md from a running mesh
	$(BIN)/python -m tests.observability.catalogue

metrics-check: install ## promtool over every /metrics of a running mesh, and over the rules and their tests (Debian: prometheus)
	$(BIN)/python -m tests.observability.catalogue --check
	promtool check rules observability/prometheus/alerts.yml
	promtool test rules observability/prometheus/alerts_test.yml
	promtool check config --syntax-only observability/prometheus/prometheus.yml

clients: install ## the clients that users have, as they are, against one mesh; each in an environment of its own under build/clients
	$(BIN)/python -m tests.clients.run

browser: install ## the page /docs in a real browser (Debian: chromium)
	$(BIN)/python -m tests.services.gateway.openapi.check_docs_page

help: ## this help
	@awk 'BEGIN {FS = ":.*?## "} /^[a-z-]+:.*?## / {printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install demo test soak bench gpu-check lint types protos check-protos lint-protos docs wheels containers metrics-docs metrics-check clients browser help
