# kvshelf: everything a contributor or a curious user runs.
#
#   make demo   a model, two engines, one shelf: see the second engine skip the prefill
#   make test   what must pass before a change goes in
#
# The first run makes the virtual environment .venv (see .ci/environment.py) and needs a package index;
# later runs need no network. Whatever a target has started ends with it. Variables:
#
#   PYTHON        the Python to build .venv with; default: the first of 3.11 to 3.13 that works
#   TORCH_INDEX   where CPU builds of torch are, for when your own package index has none
#   GPU_PYTHON    a Python with torch for the GPU of this machine, for `make gpu`
#   PYTEST_ARGS   further arguments for pytest, as in PYTEST_ARGS="-k shelf -x"
#   BENCH_ARGS    arguments of the benchmarks, as in BENCH_ARGS="load --json load.json"

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
GPU_PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

# Bytecode is written even where the environment forbids it: without it each process of an engine compiles
# kvshelf for 0.4 s, and pytest rewrites the asserts of all files each time.
export PYTHONDONTWRITEBYTECODE :=

# A command of this name may exist and still not run (pyenv), so each is tried.
find_python = for python in python3 python3.12 python3.13 python3.11; do \
	if "$$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		>/dev/null 2>&1; then echo "$$python"; break; fi; done
PYTHON ?= $(shell $(find_python))

BESIDE := $(BIN)/python .ci/beside.py

# Tests of the marks $(1), or all: those of vLLM's connector, with all real engines, in one process, those of other real
# seams in a second one, and what is simulated in a third one. The first two wait half of their time. mypy runs beside
# them.
ENGINES := tests/vllm tests/test_examples.py
PYTEST = $(BIN)/python -m pytest $(PYTEST_ARGS)
others = $(PYTEST) $(addprefix --ignore=,$(ENGINES)) -m "$(if $(1),$(1) and )$(2)"
run_tests = $(BESIDE) $(BIN)/mypy -- $(PYTEST) $(if $(1),-m "$(1)") $(ENGINES) -- $(call others,$(1),real) \
	-- $(call others,$(1),not real)

.PHONY: help
help:  ## show this list
	@echo "usage: make TARGET"; \
	awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: venv  ## run two engines on one shelf and compare them
	@$(BESIDE) $(BIN)/python examples/demo.py

style = echo "ruff"; $(BIN)/ruff check .; $(BIN)/ruff format --check .; echo "import-linter"; \
	PYTHONPATH="$(CURDIR)/src:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		$(BIN)/python -S -c 'from importlinter.cli import lint_imports_command as run; run()' --no-cache --no-logo; \
	echo "lines of code"; $(BIN)/python .ci/lines.py

.PHONY: lint
lint: venv  ## ruff, import rules, lines of code, mypy
	@$(style); echo "mypy"; $(BIN)/mypy

.PHONY: test
test: venv  ## lint, and all tests but the slow ones
	@$(style)
	@$(call run_tests,not slow)

# In THREADED are the tests with threads: 20 other orders of them. HELD_BACK is what a processor can change, layouts of
# the KV cache and how it is rounded: run as if there were no AVX-512, and as if there were neither bfloat16 nor AMX.
THREADED := tests/transfer tests/shelf tests/tiers tests/backends/test_guard.py tests/backends/test_guard_model.py
HELD_BACK := $(addprefix tests/vllm/test_,$(addsuffix .py,layout_discovery precision frozen one_engine \
	hybrid_engine))
.PHONY: test-all
test-all: venv  ## the same with the slow tests, other orders of threads, seeded faults, lesser processors
	@$(style)
	@$(call run_tests)
	@for seed in $$(seq 20); do echo "seed $$seed"; $(BESIDE) $(BIN)/python -m pytest -q --seed $$seed \
		-m "not slow and not real" $(PYTEST_ARGS) $(THREADED); done
	@$(BESIDE) $(BIN)/python tests/seeded/run.py
	@for processor in avx2 avx512; do echo "as if the processor were one with $$processor"; $(BESIDE) $(BIN)/python \
		tests/held_back/run.py $$processor $(BIN)/python -m pytest $(PYTEST_ARGS) $(HELD_BACK); done

# The order of sets decides in which order threads are woken: tests repeat a run only with the same hashes.
test test-all: export PYTHONHASHSEED := 0

.PHONY: bench
bench: venv  ## measure; prints a table
	@$(BESIDE) $(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: follow
follow: venv  ## count what a store and a load pass through
	@$(BESIDE) $(BIN)/python -m tests.follow

.PHONY: gpu
gpu:  ## on a machine with a GPU: tests and figures; see cuda/README.md
	@"$(GPU_PYTHON)" .ci/beside.py "$(GPU_PYTHON)" benchmarks/gpu.py

.PHONY: wheel
wheel: venv  ## build the source archive and a wheel for this machine, into dist/
	@$(BIN)/python -m build --no-isolation --outdir dist; $(BIN)/twine check --strict dist/*

.PHONY: docs
docs: venv  ## build the documentation into site/
	@$(BIN)/python .ci/pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: clean
clean:  ## remove what was built, keep .venv
	@rm -rf build dist site .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: venv
venv:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No usable Python 3.11 to 3.13 with venv found (on Debian: apt install python3-venv);" \
			"name one with make ... PYTHON=/path/to/python" >&2; exit 1; fi; \
	"$(PYTHON)" .ci/environment.py $(VENV) --torch-index "$(TORCH_INDEX)"
