PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The tests start some hundred processes. Each would compile the package anew where the environment forbids bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check published benchmarks environment clean

environment: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/tightfit train examples/quickstart.yaml

# CALIBRATION=slow-products, slow-memory or busy-hour: other made-up figures of the CPU (tests/made_up_devices.py)
test: $(READY)
	$(BIN)/python -m pytest --durations=25 $(if $(CALIBRATION),--calibration $(CALIBRATION))

test-all: $(READY)
	$(BIN)/python -m pytest -m 'slow or not slow'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

published: $(READY)
	$(BIN)/python -m benchmarks.published.peaks
	$(BIN)/python -m benchmarks.published.sharded
	$(BIN)/python -m benchmarks.published.seconds
	$(BIN)/python benchmarks/accuracy_page.py

# Writes the page from benchmarks/results. The page says how each figure is measured again.
benchmarks: $(READY)
	$(BIN)/python benchmarks/benchmarks_page.py

clean:
	rm -rf $(VENV) runs
