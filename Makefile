PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt $(wildcard src/dynaexq/native/*.[ch]pp src/dynaexq/native/*/*.[ch]pp)
TEXTS ?=

.PHONY: setup demo test lint bench adaptive budgets kernels soak table matrix clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints-dev.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints-dev.txt torch scikit-build-core nanobind cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip install -q --disable-pip-version-check -c constraints-dev.txt --no-build-isolation -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/dynaexq generate --demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.tiers --quick
	$(BIN)/python -m benchmarks.control --quick
	$(BIN)/python -m benchmarks.adaptive --quick
	$(BIN)/python -m benchmarks.budgets --quick
	$(BIN)/python -m benchmarks.kernels --quick
	$(BIN)/python -m benchmarks.tracing --quick
	$(BIN)/python -m benchmarks.simulator --quick
	$(BIN)/python -m benchmarks.offload --quick
	$(BIN)/python -m benchmarks.expertflow --quick

table: setup
	$(BIN)/python -m benchmarks.tiers $(if $(TEXTS),--texts $(TEXTS)) --json benchmarks/results/tiers.json --readme README.md

adaptive: setup
	$(BIN)/python -m benchmarks.adaptive $(if $(TEXTS),--texts $(TEXTS)) --json benchmarks/results/adaptive.json --readme README.md

budgets: setup
	$(BIN)/python -m benchmarks.budgets $(if $(TEXTS),--texts $(TEXTS)) --json benchmarks/results/budgets.json --readme README.md
	$(BIN)/python -m benchmarks.budgets_plot benchmarks/results/budgets.json -o benchmarks/results/budgets.svg

kernels: setup
	$(BIN)/python -m benchmarks.kernels --json benchmarks/results/kernels.json --readme README.md

# Ten minutes under one memory limit while the workload shifts.
soak: setup
	DYNAEXQ_SOAK_SECONDS=600 $(BIN)/python -m pytest -s tests/test_soak.py tests/server/test_load.py

# The plug-in on every Transformers it claims to work with (needs the package index).
matrix: setup
	for version in 5.19 5.20 5.21 5.22 5.23 5.24; do \
	  $(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target $(VENV)/transformers-$$version "transformers==$$version.*" && \
	  PYTHONPATH=$(CURDIR)/$(VENV)/transformers-$$version $(BIN)/python -m pytest tests/integrations || exit 1; \
	done

clean:
	rm -rf $(VENV) build
