# Two commands: `make demo` and `make test`. Both create the environment where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
TOOLS_STAMP := $(VENV)/.stamp-tools
ENV_STAMP := $(VENV)/.stamp-env
BUILD_STAMP := $(VENV)/.stamp-build
READY := $(ENV_STAMP) $(BUILD_STAMP)
TESTS ?=
MODEL := models/SmolLM2-135M-Instruct
CORE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml
BUILD_TOOLS := cmake ninja pybind11 setuptools wheel
NOT_COMPILED := /(tests?|testing|multimodal_gen|rllib)/|transformers/models/(?!auto|llama|qwen)
MAKEFLAGS += --jobs=2 # the C++ core is built while pip, which uses one core, unpacks
export PATH := $(CURDIR)/$(BIN):$(PATH)
RANK_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help env demo spin test lint format bench clean chaos-ring chaos-runs chaos-sim layouts

help:
	@echo "make demo        train SmolLM2-135M on arithmetic, end to end, on this machine"
	@echo "make test        every test (under 25 minutes on two cores)"
	@echo "make lint        ruff, mypy, clang-format"
	@echo "make chaos-ring  the long proof of the sample ring"
	@echo "make chaos-runs  the long tests on whole runs"
	@echo "make chaos-sim   many seeds of the simulated rollouter and publications"
	@echo "make layouts     every trainer layout into every engine layout, compared with a load from disk"
	@echo "make bench       benchmarks against peers and physical bounds"

env: $(READY)

$(TOOLS_STAMP): requirements/cpu.txt
	@echo "asyncrl: creating $(VENV) (about 3 GB, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $$(grep -E '^($(subst $() ,|,$(BUILD_TOOLS)))==' requirements/cpu.txt)
	@touch $@

$(ENV_STAMP): $(TOOLS_STAMP) requirements/cpu.txt requirements/cpu-nodeps.txt
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) --no-deps -r requirements/cpu-nodeps.txt
	@$(BIN)/python -m compileall -q -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib > $(VENV)/compileall.log 2>&1 || true # some are templates
	@touch $@

$(BUILD_STAMP): $(TOOLS_STAMP) $(CORE_SOURCES)
	@echo "asyncrl: building the C++ core"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(MODEL)/config.json: | $(READY)
	@$(RANK_ENV) $(BIN)/python -m asyncrl.data.smollm2 $(MODEL)

demo: $(READY) $(MODEL)/config.json
	@$(BIN)/asyncrl run examples/demo.toml name=demo-$$(date +%Y%m%d-%H%M%S)

# The model checker of the ring's protocol comes from Debian; a continuous integration that is root gets it.
spin: $(TOOLS_STAMP)
	@command -v spin > /dev/null || { test "$$CI" = true && test "$$(id -u)" = 0 \
		&& { apt-get update -qq && apt-get install -y -qq spin; } > $(VENV)/spin.log 2>&1; } \
		|| echo "asyncrl: spin is not installed, so the ring's model is not checked; apt-get install spin"

test: $(READY) spin
	$(RANK_ENV) $(BIN)/python -m scripts.run_tests $(TESTS)

lint: $(READY)
	$(BIN)/ruff check asyncrl megatron_ext tests benchmarks setup.py
	$(BIN)/ruff format --check asyncrl megatron_ext tests benchmarks setup.py
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

format: $(READY)
	$(BIN)/ruff check --fix asyncrl megatron_ext tests benchmarks setup.py
	$(BIN)/ruff format asyncrl megatron_ext tests benchmarks setup.py
	$(BIN)/clang-format -i $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

chaos-ring: $(READY)
	$(RANK_ENV) $(BIN)/python tests/chaos/ring/run.py

chaos-runs: $(READY)
	$(RANK_ENV) $(BIN)/python -m pytest -m long tests

chaos-sim: $(READY)
	$(RANK_ENV) $(BIN)/python -m tests.sim.run --seeds 20000
	$(RANK_ENV) $(BIN)/python -m tests.sim.fleet_run --seeds 20000

layouts: $(READY)
	$(RANK_ENV) $(BIN)/python -m scripts.check_layouts

bench: $(READY)
	$(RANK_ENV) $(BIN)/python benchmarks/ring.py
	$(RANK_ENV) $(BIN)/python benchmarks/publish.py
	$(RANK_ENV) $(BIN)/python benchmarks/pack.py

clean:
	rm -rf build asyncrl/_C*.so *.egg-info
