.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
PROTOS := $(shell cd protos && find tokenloom -name '*.proto' | sort)
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -I .
# Where pip finds torch; empty: the default index. PyTorch's public CPU index serves machines that would otherwise draw CUDA.
TORCH_INDEX ?=
TORCH_VERSION := 2.13.0
# Where `make lock` finds torch for CPUs.
TORCH_CPU_SOURCE ?= --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match
# Levels of processors for which `make wheel` builds kernels: a comma-separated list, none, or all that g++ here can build.
LEVELS ?= all
# `make lock` keeps the versions of the locks where it can; `make lock LOCK_FLAGS=--upgrade` takes the newest.
LOCK_FLAGS ?=
# The images' dependencies; an engine's image has those of locks/ray.txt only with EXTRA=ray. locks/tools.txt and
# locks/build.txt are not for images.
LOCKS := service engine-cpu engine-cuda ray
TOOLS := build/tools
# The environment of `make site`; pyproject.toml's group `docs` lists its packages.
DOCS := build/docs
# The version that the figures use too.
PYRIGHT_VERSION = $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' tools/figures/editor.py)
# Whole meshes of processes, killed parts, campaigns of faults, comparisons with transformers: a command of their own.
LONG_TESTS := tests/e2e tests/chaos tests/soak tests/attack tests/parity tests/mesh/faults
# Short forms of the benchmarks, and what idle and busy meshes take of a processor: another one.
BENCHMARK_TESTS := tests/benchmarks tests/e2e/test_busy.py tests/e2e/test_idle.py
# Kernels built for other processors and for GPUs, models in parts on several workers and on Ray, a server of LMCache, and
# a sample of the pairs of features: another one.
PLATFORM_TESTS := tests/gpu_worker/kernels/test_quantized_paths.py tests/gpu_worker/kernels/test_prebuilt_results.py \
	tests/gpu_worker/kernels/test_not_finite_levels.py tests/engine_core/kv_transfer/test_lmcache_server.py \
	tests/gpu_worker/kernels/triton/test_machine_code.py tests/parity/ranks tests/matrix
TRITON_TESTS := tests/gpu_worker/kernels/triton --ignore=tests/gpu_worker/kernels/triton/test_machine_code.py
OTHER_TESTS := $(BENCHMARK_TESTS) $(PLATFORM_TESTS)
# Processes that run tests side by side on two cores. Those of `make test` wait for other processes, disks and timers for
# half of their time, so a fourth one finds work; three run whole meshes of processes.
PROCESSES = 3
PYTEST = $(BIN)/python -m pytest -q -n $(PROCESSES) --dist loadscope --no-loadscope-reorder
# With AGAIN=1, tests that failed run once more one after the other, and only those that fail again count. This holds for
# pytest's exit status 1; every other one means that the run itself broke (2 interrupted, 3 internal error, 4 wrong use,
# 5 no tests, more than 128 a signal), and then tests that never ran would count as passed.
AGAIN ?=
# With TURN=N, a number, test, test-long and test-triton run the part of the tests whose turn it is (tests/turns.py), as
# .ci/run does; empty: all.
TURN ?=
RUN_TESTS = $(PYTEST) $(1) $(if $(AGAIN),|| { status=$$?; test $$status = 1 && $(MAKE) test-again; })
# How long `make soak` sends requests to a mesh without faults.
SOAK_SECONDS ?= 7200
export HF_HUB_OFFLINE ?= 1
# The tests start hundreds of processes that import the same modules: let Python keep their bytecode.
unexport PYTHONDONTWRITEBYTECODE

##@ First steps

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

demo: install ## start the whole mesh, chat once through it, kill an engine during an answer, stop everything; then ask about a picture
	@$(BIN)/tokenloom demo
	@$(BIN)/tokenloom demo --model tokenloom-picture

test: PROCESSES = 4
test: install ## run the tests, except those of the three commands below; they need neither a GPU nor a network
	$(if $(TURN),TEST_TURN=$(TURN)) $(call RUN_TESTS,$(addprefix --ignore=,$(LONG_TESTS) $(OTHER_TESTS)))

test-again: install ## run the tests that failed in the last run once more, one after the other, and list them
	$(BIN)/python -m pytest -q -rpf --last-failed --last-failed-no-failures none

##@ Checks before a commit (all of them: .ci/run)

lint: install ## check rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install ## check types with mypy --strict
	$(BIN)/mypy -p tokenloom

pyright: install ## check that an editor finds every definition in a fresh clone (Node.js)
	npx --yes pyright@$(PYRIGHT_VERSION)

check-protos: install ## fail if the committed stubs are stale
	@rm -rf build/protos && mkdir -p build/protos
	@cd protos && $(PROTOC) --python_out=../build/protos --grpc_python_out=../build/protos --pyi_out=../build/protos --mypy_grpc_out=quiet:../build/protos $(PROTOS)
	@cd build/protos && for f in $$(find . -name '*.py*'); do cmp $$f ../../protos/$$f || exit 1; done

lint-protos: ## check the protos with buf lint (Node.js)
	cd protos && npx --yes @bufbuild/buf@1.75.0 lint

breaking-protos: ## check that the protos understand those of the last release (Node.js)
	cd protos && npx --yes @bufbuild/buf@1.75.0 breaking --against last_release.binpb

##@ Generated files

protos: install ## regenerate the client stubs beside the .proto files
	cd protos && $(PROTOC) --python_out=. --grpc_python_out=. --pyi_out=. --mypy_grpc_out=quiet:. $(PROTOS)

stubs: install ## write build/stubs/: the public API's stubs for Node.js (npm), and for Go with Debian's packages of Go 1.19
	$(BIN)/python -m tools.stubs

release-protos: ## keep the protos as those of a release, for breaking-protos (Node.js)
	cd protos && npx --yes @bufbuild/buf@1.75.0 build --exclude-source-info --output last_release.binpb

docs: install ## write the pages of docs/ that come from the code
	$(BIN)/python -m tokenloom.reference docs

models-docs: install ## write docs/reference/models.md after trying every causal language model of transformers (5 minutes)
	$(BIN)/python -m tests.soak.models.models_page

schema-docs: install ## write docs/reference/schemas.md: what becomes of schemas as pydantic, zod and others write them
	$(BIN)/python -m tests.tokenloom.request.schema_pool.pool_page

metrics-docs: install ## write docs/reference/metrics.md from a running mesh
	$(BIN)/python -m tests.observability.catalogue

pictures: install ## draw the pictures of docs/pictures
	$(BIN)/python -m tools.pictures

site: $(DOCS)/.installed ## build the documentation into build/site; it is read without a network and without a server
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	$(DOCS)/bin/python tools/offline_site.py build/site

$(DOCS)/.installed: pyproject.toml
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	@$(DOCS)/bin/python -m pip install --quiet --group docs
	@touch $@

kernels: install ## build the C++ kernels ahead, for every level of processors that a compiler here can build
	$(BIN)/tokenloom build-kernels

wheel: ## build dist/: the client's wheel, and the others with the kernels of LEVELS, with nothing but python3 and g++
	$(PYTHON) tools/build_wheels.py --levels $(LEVELS)

chart: install ## write the objects of charts/tokenloom from k8s/ (kubectl)
	$(BIN)/python tools/helm_chart.py

wheels: install ## download the locked dependencies as wheels, for image builds without an index (EXTRA=ray: Ray too)
	@rm -rf build/wheels && mkdir -p build/wheels
	$(DOWNLOAD) --dest build/wheels/service -r locks/build.txt -r locks/service.txt
	$(DOWNLOAD) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --dest build/wheels/engine -r locks/build.txt -r locks/engine-cpu.txt \
		$(if $(EXTRA),-r locks/$(EXTRA).txt)

##@ Supply chain

lock: $(TOOLS)/.installed ## write locks/: what the images install, with hashes, within the bounds of pyproject.toml
	echo 'setuptools>=78.1.1' | $(COMPILE) --output-file locks/build.txt -
	$(COMPILE) --output-file locks/service.txt pyproject.toml
	echo 'torch==$(TORCH_VERSION)+cpu' | $(COMPILE) $(TORCH_CPU_SOURCE) --extra engine --extra encoder --output-file locks/engine-cpu.txt pyproject.toml -
	echo 'torch==$(TORCH_VERSION)' | $(COMPILE) --extra engine --extra encoder --output-file locks/engine-cuda.txt pyproject.toml -
	echo 'ray>=2.50' | $(COMPILE) --constraint locks/engine-cpu.txt --output-file locks/ray.txt -
	$(COMPILE) --output-file locks/tools.txt locks/tools.in

audit: $(TOOLS)/.installed ## look up the locked versions in the databases of known vulnerabilities (needs a network)
	@mkdir -p build/audit
	@for lock in $(LOCKS); do echo "$$lock"; sed 's/^\(torch==[0-9.]*\)+cpu/\1/' locks/$$lock.txt > build/audit/$$lock.txt; \
		$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off -r build/audit/$$lock.txt || exit 1; done

sbom: $(TOOLS)/.installed ## write build/sbom/: a CycloneDX bill of materials for each image, from its lock
	@mkdir -p build/sbom
	@for lock in $(LOCKS); do $(TOOLS)/bin/python -W ignore -m cyclonedx_py requirements locks/$$lock.txt --pyproject pyproject.toml \
		--output-reproducible --output-format JSON --output-file build/sbom/$$lock.cdx.json || exit 1; done

check-images: ## list the base images of Dockerfile and docker-compose.yml that are not named by digest
	$(PYTHON) tools/images.py check

pin-images: ## ask the registry for the digest of each base image's tag, and write it (docker)
	$(PYTHON) tools/images.py pin

$(TOOLS)/.installed: locks/tools.txt
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --require-hashes -r locks/tools.txt
	@touch $@

DOWNLOAD = $(BIN)/pip download --quiet --require-hashes --no-deps --only-binary :all:
COMPILE = $(TOOLS)/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links \
	--only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
	--custom-compile-command 'make lock' $(LOCK_FLAGS)

##@ Longer tests

test-long: install ## run the tests of whole meshes, of lost parts and of parity, and short forms of soak and attack
	$(if $(TURN),TEST_TURN=$(TURN)) $(call RUN_TESTS,$(LONG_TESTS) $(addprefix --ignore=,$(OTHER_TESTS)))

test-benchmarks: install ## run short forms of the benchmarks, and measure what idle and busy meshes take (2 minutes)
	$(PYTEST) $(BENCHMARK_TESTS)

lmcache: .lmcache/bin/python ## install LMCache's server into .lmcache, for the test of stores that share KV blocks

# Without what its package asks for beside the server: CUDA's Python, clouds and a web framework. torch is that of .venv.
.lmcache/bin/python: | install
	$(PYTHON) -m venv .lmcache
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(.lmcache/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of_venv.pth
	.lmcache/bin/pip install --quiet aiohttp cachetools numba py-cpuinfo
	.lmcache/bin/pip install --quiet --no-deps lmcache==0.5.6

test-platforms: install lmcache ## check kernels built for other processors and an H100, models on several workers, and some pairs of features (5 minutes)
	$(PYTEST) $(PLATFORM_TESTS)

# The oldest version of Triton that pyproject.toml allows, which machines with a GPU have, beside the newest.
TRITON_VERSION := 3.6.0

build/triton-$(TRITON_VERSION)/.installed:
	$(BIN)/pip install --quiet --no-deps --target $(@D) triton==$(TRITON_VERSION)
	@touch $@

test-triton: install build/triton-$(TRITON_VERSION)/.installed ## run the kernels' tests with the oldest supported version of Triton and the locked torch
	$(if $(TURN),TEST_TURN=$(TURN)) PYTHONPATH=build/triton-$(TRITON_VERSION) $(PYTEST) $(TRITON_TESTS)

matrix: install ## try every pair of features on a mesh of its own and write docs/reference/combinations.md (90 minutes; goes on where it ended)
	$(BIN)/python -m tests.matrix

compat: install ## serve requests with meshes whose parts are of this and of the last release (2 minutes)
	$(BIN)/python -m tests.compat

simulate: install ## run 10,000 seeds of the simulated mesh, with faults of every kind, and find the bugs that it must find
	$(BIN)/python -m tests.simulation --seeds 10000 --jobs 2
	$(BIN)/python -m tests.simulation --seeds 10000 --jobs 2 --chats --liars
	$(BIN)/python -m tests.simulation --seeds 10000 --jobs 2 --chats --movers
	$(BIN)/python -m tests.simulation --seeds 1000 --jobs 2 --stutters
	for bug in no_retry stale_frames ignored_lease; do $(BIN)/python -m tests.simulation --seeds 200 --bug $$bug || exit 1; done
	$(BIN)/python -m tests.simulation.waves --schedules 20000

soak: install ## run random schedules of faults and of awaits, requests that move from engine to engine, JSON schemas, expensive grammars, what faults leave, operators beside faults, flipped bits of weights, two hours of requests (SOAK_SECONDS), malformed requests, replayed answers, frames and command lines, tiny models
	$(BIN)/python -m tests.soak --schedules 1000
	$(BIN)/python -m tests.soak --schedules 1000 --async-scheduling
	$(BIN)/python -m tests.soak --schedules 50 --worker model
	$(BIN)/python -m tests.soak --schedules 50 --executor mp
	$(BIN)/python -m tests.soak --schedules 50 --executor mp --async-scheduling
	$(BIN)/python -m tests.soak.moves
	$(BIN)/python -m tests.soak.moves --layout split --drafts 3 --async-scheduling
	$(BIN)/python -m tests.soak.moves --worker model --rounds 4
	$(BIN)/python -m tests.soak.moves --worker model --layout split --drafts 3 --rounds 4
	$(BIN)/python -m tests.explorer --seeds 10000 --jobs 2
	$(BIN)/python -m tests.soak.schemas --schemas 300
	$(BIN)/python -m tests.soak.ledger
	$(BIN)/python -m tests.soak.administration
	$(BIN)/python -m tests.soak.endurance --seconds $(SOAK_SECONDS)
	$(BIN)/python -m tests.soak.waves
	$(BIN)/python -m tests.soak.waves --experts
	$(BIN)/python -m tests.soak.adapters
	$(BIN)/python -m tests.soak.flips
	$(BIN)/python -m tests.soak.kv_flips
	$(BIN)/python -m tests.soak.verified --requests 10000 --rounds 100
	$(BIN)/python -m tests.soak.verified --worker model --requests 10000 --rounds 100
	$(BIN)/python -m tests.soak.bombs
	$(BIN)/python -m tests.soak.fuzz --requests 20000
	$(BIN)/python -m tests.soak.replay --seeds 4000
	$(BIN)/python -m tests.soak.native --seeds 10000
	$(BIN)/python -m tests.soak.native --seeds 10000 --sanitize
	$(BIN)/python -m tests.soak.frames --seeds 10000
	$(BIN)/python -m tests.soak.command_lines --seeds 10000
	$(BIN)/python -m tests.soak.models.transformers_models

attack: install ## attack running meshes while another key's stream runs, and print what it noticed (20 minutes, nothing else running)
	$(BIN)/python -m tests.attack

soak-memory: install ## run four engines of one host under full load for five minutes, and compare their memory with the plan
	$(BIN)/python -m tests.soak.memory

network: install ## run prefill and decode engines on both sides of a bad network (root, Debian: iproute2, nftables)
	$(BIN)/python -m tests.soak.network

campaign: install ## kill parts of a mesh on a lossy and slow network under 20,000 requests, then 5,000 to the demo model in bfloat16 with drafts; goes on where the last call ended (root, Debian: iproute2, nftables)
	mkdir -p build
	$(BIN)/python -m tests.soak.shards --results build/shards-hash
	$(BIN)/python -m tests.soak.shards --results build/shards-model --worker model --shards 6 --requests 834

clients: install ## run unmodified client libraries against one mesh, each in its own environment, and agents' turns
	$(BIN)/python -m tests.clients.run
	$(BIN)/python -m tests.clients.agent_turns

browser: install ## use the pages / and /docs in a real browser, and take pictures of / (Debian: chromium, fonts-inter; Node.js)
	$(BIN)/python -m tests.services.gateway.openapi.check_docs_page
	$(BIN)/python -m tests.services.gateway.page.check_page

docs-check: install ## type the console blocks of README, quick start and tutorials into a shell, in a fresh clone (QUICK=--quick: in this environment)
	$(BIN)/python -m tests.docs.check_console $(QUICK)

wheel-check: install $(TOOLS)/.installed ## install the wheels of dist/ into clean environments; print the CPU time of starts, and what the client takes
	$(BIN)/python -m tests.wheel.check_client $(TOOLS)/bin/uv
	$(BIN)/python -m tests.wheel.check_wheel

chart-check: ## render charts/tokenloom with Helm's library, and compare it with k8s/ (kubectl)
	@test -x build/helm/bin/python || $(PYTHON) -m venv build/helm
	@build/helm/bin/pip install --quiet 'helm-python-sdk>=0.2' 'PyYAML>=6'
	build/helm/bin/python -m tests.k8s.chart_check

containers: install ## build the images, run docker-compose.yml with podman, kill parts of it (root, Debian)
	$(BIN)/python -m tests.containers.run

metrics-check: install ## check /metrics of a running mesh, the alert rules and their tests (Debian: prometheus)
	$(BIN)/python -m tests.observability.catalogue --check
	promtool check rules observability/prometheus/alerts.yml
	promtool test rules observability/prometheus/alerts_test.yml
	promtool check config --syntax-only observability/prometheus/prometheus.yml

dashboards: install ## run every query of dashboard, alerts and on-call.md against a real Prometheus (Debian: prometheus)
	$(BIN)/python -m tests.observability.live

gpu-check: ## check and measure what a GPU computes, with any Python that has torch, in 8 minutes (SECTIONS=a,b: some); without a GPU it prints one line
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/gpu_check/start.py $(if $(SECTIONS),--sections $(SECTIONS))

gpu-rehearsal: ## run the kernels' tests and the check with PyTorch and Triton as a GPU machine has them, on a CPU (downloads gigabytes)
	$(PYTHON) tests/gpu_check/rehearsal.py

##@ Measurements

bench: install ## run the short benchmarks: the mesh alone, the parts of a step, the offline engine
	$(BIN)/tokenloom bench mesh --step-ms 20 --step-ms 0 --batch 64 --seconds 5
	$(BIN)/tokenloom bench step --batch 1 --batch 8 --steps 32
	$(BIN)/tokenloom bench throughput --num-prompts 64

house: install ## print figures about the source tree: sizes, hops of a request, imports, pyright
	$(BIN)/python tools/house.py

house-check: install ## fail if a figure of the source tree is beyond its limit (tools/figures/gates.py)
	$(BIN)/python tools/house.py --check --no-pyright

help: ## print this help
	@awk 'BEGIN {FS = ":.*?## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*?## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install demo test test-again test-long test-benchmarks test-platforms lmcache lint types pyright check-protos lint-protos breaking-protos release-protos protos stubs docs models-docs metrics-docs schema-docs kernels wheel wheels lock audit sbom check-images pin-images compat matrix soak attack soak-memory network campaign clients browser containers metrics-check dashboards gpu-check gpu-rehearsal test-triton bench house house-check chart chart-check docs-check wheel-check pictures site help
