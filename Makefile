# Every target but `setup` sets the environment up first if it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test bench zoo lint

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Espalier needs Python 3.11 or newer: make setup PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/espalier train jobs/demo.toml

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

bench: $(READY)
	@failed=; \
	for script in benchmarks/[!_]*.py; do \
		test "$$script" != benchmarks/zoo.py || continue; \
		echo "== $$script"; \
		OMP_NUM_THREADS=1 $(BIN)/python "$$script" || failed="$$failed $$script"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Takes hours; what it has found is kept, and a run that was broken off goes on.
zoo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo.py --write docs/zoo.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
