# Every target but `setup` sets the environment up first if it is missing or out of date.
PYTHON ?= python3
# another torch, in an environment of its own, with the Triton that it asks for: make test TORCH=2.11.0
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
PINS := $(if $(TORCH),$(VENV)/)constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# processes of pytest that share the suite, each with ranks of its own: on two cores the third works while others wait
JOBS ?= 3

.PHONY: setup demo test bench experiments gpu zoo docs lint types style

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Espalier needs Python 3.11 or newer: make setup PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),grep -Ev '^(torch|torchvision|triton|setuptools)=' constraints.txt > $(PINS))
	$(BIN)/python -m pip install --constraint $(PINS) --editable '.[dev]' $(TORCH:%=torch==%)
	@touch $@

demo: $(READY)
	$(BIN)/espalier demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

bench: $(READY)
	@failed=; \
	for script in benchmarks/[!_]*.py; do \
		case "$$script" in */zoo.py|*/experiments.py) continue;; esac; \
		echo "== $$script"; \
		OMP_NUM_THREADS=1 $(BIN)/python "$$script" || failed="$$failed $$script"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# The paper's, each beside its figures; some are benchmarks of their own, too.
experiments: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/experiments.py

# All that wants a GPU, in about ten minutes; without one, what the simulated device can tell.
gpu: $(READY)
	$(BIN)/python tools/gpu.py --write docs/figures-gpu.md

# Takes hours; what it has found is kept, and a run that was broken off goes on.
zoo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo.py --write docs/zoo.md

# The site goes to build/site; a warning is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(PINS) --editable '.[docs]'
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html"

# mypy takes longest, on one core: the rest goes beside it
lint: $(READY)
	$(MAKE) --no-print-directory --jobs 2 types style

types: $(READY)
	$(BIN)/mypy $(TORCH:%=--cache-dir $(VENV)/.mypy_cache)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/private.py
	$(BIN)/python tools/devices.py
	$(BIN)/python tools/sizes.py
