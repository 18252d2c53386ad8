# kvshelf: everything a contributor or a curious user runs.
#
#   make demo       a model, two engines, one shelf: see the second engine skip the prefill
#   make test-fast  what to run after each edit
#   make test       what must pass before a change goes in
#
# The first run makes the virtual environment .venv (see .ci/environment.py) and needs a package index;
# later runs need no network. Variables:
#
#   PYTHON          the Python to build .venv with; default: the first of 3.11 to 3.13 that works
#   TORCH_INDEX     where CPU builds of torch are, for when your own package index has none
#   FUZZ_SECONDS    how long `make fuzz` runs
#   PYTEST_ARGS     further arguments for pytest, as in PYTEST_ARGS="-k shelf -x"
#   WHEELS_ARGS     arguments of the build of wheels, as in WHEELS_ARGS="--torch torch==2.9.1"
#   SOAK_ARGS       arguments of the soak, as in SOAK_ARGS="--seconds 120 --json soak.json"

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
FUZZ_SECONDS ?= 300
WHEELS_ARGS ?=

# Bytecode is written even where the environment forbids it: without it each process of an engine compiles
# kvshelf for 0.4 s, and pytest rewrites the asserts of all files each time.
export PYTHONDONTWRITEBYTECODE :=

# A command of this name may exist and still not run (pyenv), so each is tried.
find_python = for python in python3 python3.12 python3.13 python3.11; do \
	if "$$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
		>/dev/null 2>&1; then echo "$$python"; break; fi; done
PYTHON ?= $(shell $(find_python))

# Tests of the marks $(1), or all: those of vLLM's connector, with all real engines, and of servers in one process, the
# others in a second one, which takes as long, and mypy beside them, which takes a minute when its cache is empty. A
# command in the background does not get Ctrl-C, so the shell ends it. Exit code 5: none selected.
ENGINES := tests/vllm tests/test_examples.py tests/server tests/proxy
run_tests = logs=$$(mktemp -d); failed=0; \
	trap 'kill $$(jobs -p) 2>/dev/null || true; wait; rm -rf $$logs' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/mypy >$$logs/mypy 2>&1 & mypy=$$!; \
	$(BIN)/python -m pytest $(if $(1),-m "$(1)") $(PYTEST_ARGS) $(ENGINES) >$$logs/engines 2>&1 & engines=$$!; \
	$(BIN)/python -m pytest $(if $(1),-m "$(1)") $(PYTEST_ARGS) $(addprefix --ignore=,$(ENGINES)) || [ $$? = 5 ] || failed=1; \
	wait $$engines || [ $$? = 5 ] || failed=1; cat $$logs/engines; \
	wait $$mypy || failed=1; echo "mypy"; cat $$logs/mypy; exit $$failed

.PHONY: help
help:  ## show this list
	@echo "usage: make TARGET"; \
	awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: venv  ## run two engines on one shelf and compare them
	@$(BIN)/python examples/demo.py

.PHONY: test
test: venv style  ## lint, types, import rules, tests
	@$(call run_tests,not slow)

.PHONY: test-fast
test-fast: venv  ## the tests to run after each edit: those in simulated time, without vLLM
	@$(BIN)/python -m pytest -m "not slow and not real" --ignore=tests/vllm $(PYTEST_ARGS)

.PHONY: test-all
test-all: venv style  ## the same with the slow tests, wheel, engines as on lesser processors, and seeded faults
	@$(call run_tests)
	@$(BIN)/python .ci/wheel_check.py $(VENV)
	@$(MAKE) test-orders
	@$(MAKE) test-seeded
	@$(MAKE) test-held-back

SEEDS ?= 20
THREADED := tests/transfer tests/shelf tests/tiers tests/backends/test_guard.py tests/backends/test_guard_model.py
.PHONY: test-orders
test-orders: venv  ## tests with threads in SEEDS other orders (20)
	@for seed in $$(seq $(SEEDS)); do echo "seed $$seed"; \
		$(BIN)/python -m pytest -q --seed $$seed -m "not slow and not real" $(PYTEST_ARGS) $(THREADED); done

# The order of sets decides in which order threads are woken: tests repeat a run only with the same hashes.
test test-fast test-all test-orders: export PYTHONHASHSEED := 0

EXAMPLES := $(addprefix tests/test_examples.py::test_,demo prompts_that_share_a_document)
.PHONY: test-held-back
test-held-back: venv  ## tests of engines as if without AVX-512, and as if without bfloat16 and AMX
	@for processor in avx2 avx512; do echo "as if the processor were one with $$processor"; \
		$(BIN)/python tests/held_back/run.py $$processor $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS) tests/vllm $(EXAMPLES); \
		done

.PHONY: test-seeded
test-seeded: venv  ## plant each fault of tests/seeded/faults.toml, and run the tests that catch it
	@$(BIN)/python tests/seeded/run.py

.PHONY: bench
bench: venv  ## measure; prints a table
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

.PHONY: soak
soak: venv  ## three engines on a shelf that is damaged all the time, 10 minutes
	@$(BIN)/python tests/soak/soak.py $(SOAK_ARGS)

.PHONY: wheels
wheels: venv  ## build, audit and try the source archive and the wheels of a release, into dist/
	@$(BIN)/python .ci/wheels.py $(VENV)/wheelhouse dist $(WHEELS_ARGS)

.PHONY: fuzz
fuzz: venv  ## look for bytes that the decoder cannot take
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python -m pip install -q "atheris>=2.3" || \
		echo "atheris is not to be had for this Python: hypothesis has to do"
	@$(BIN)/python tests/fuzz/fuzz_decoder.py --seconds $(FUZZ_SECONDS)

.PHONY: lint
lint: style  ## ruff, mypy, import-linter, lines of code
	@echo "mypy"; $(BIN)/mypy

.PHONY: style
style: venv
	@echo "ruff"; $(BIN)/ruff check .; $(BIN)/ruff format --check .
	@echo "import-linter"; \
	PYTHONPATH="$(CURDIR)/src:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		$(BIN)/python -S -c 'from importlinter.cli import lint_imports_command as run; run()' --no-cache --no-logo
	@echo "lines of code"; $(BIN)/python .ci/lines.py

.PHONY: format
format: venv  ## rewrite the code in the project's style
	@$(BIN)/ruff check --fix .; $(BIN)/ruff format .

.PHONY: docs
docs: venv  ## build the documentation into site/
	@$(BIN)/python .ci/config_page.py > docs/configuration.md
	@$(BIN)/python .ci/modules_page.py > docs/modules.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

include cuda/gpu.mk

.PHONY: clean
clean:  ## remove what was built, keep .venv
	@rm -rf build dist site .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.PHONY: venv
venv:
	@if [ -z "$(PYTHON)" ]; then \
		echo "No usable Python 3.11 to 3.13 with venv found (on Debian: apt install python3-venv);" \
			"name one with make ... PYTHON=/path/to/python" >&2; exit 1; fi; \
	"$(PYTHON)" .ci/environment.py $(VENV) --torch-index "$(TORCH_INDEX)" --extra test --extra docs
