PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The tests start some hundred processes. Each would compile the package anew where the environment forbids bytecode.
unexport PYTHONDONTWRITEBYTECODE

# The ordinary CUDA build of the same PyTorch, which runs on a null card (tightfit/nullcard), and its Triton. Everything
# else is .venv's.
CARD := .venv-card
CARD_BIN := $(CARD)/bin
CARD_READY := $(CARD)/.ready
ON_CARD := $(CARD_BIN)/python -m tightfit.devices.nullcard rtx4090

.PHONY: demo test test-browser test-beside-card test-card test-real-card test-all check docs dist published benchmarks environment clean

environment: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

# With three equals signs pip takes the version as it is written, and not a +cpu build of it.
$(CARD_READY): $(READY)
	$(PYTHON) -m venv $(CARD)
	$(CARD_BIN)/python -m pip install --quiet --no-deps 'torch===$(shell sed -n 's/^torch==//p' constraints.txt)'
	$(CARD_BIN)/python -m pip install --quiet --no-deps "$$($(CARD_BIN)/python -c "from importlib.metadata import requires; \
	  print(next(each.split(';')[0] for each in requires('torch') if each.startswith('triton')))")"
	$(CARD_BIN)/python -c "import pathlib, sysconfig; \
	  there, here = (next(pathlib.Path(v).glob('lib/python*/site-packages')).resolve() for v in ('$(VENV)', '$(CARD)')); \
	  (here / 'shared.pth').write_text(f'import site; site.addsitedir({str(there)!r})\n')"
	touch $(CARD_READY)

# The site of the documentation has an environment of its own, without torch: it reads sources, pages and results.
DOCS := .venv-docs
$(DOCS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet $(shell sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ,) typer
	touch $(DOCS)/.ready

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --quiet

# Wheel and source distribution, checked, and the wheel tried alone in an empty environment.
RELEASE := .venv-release
$(RELEASE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet build twine check-wheel-contents
	touch $(RELEASE)/.ready

dist: $(RELEASE)/.ready
	rm -rf dist
	$(RELEASE)/bin/python -m build --outdir dist .
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) tools/try_wheel.py dist/*.whl
	$(PYTHON) tools/try_wheel.py dist/*.whl --extras

demo: $(READY)
	$(BIN)/tightfit train examples/quickstart.yaml

# CALIBRATION=slow-products, slow-memory or busy-hour: other made-up figures of the CPU (tests/made_up_devices.py)
test: $(READY)
	$(BIN)/python -m pytest --durations=25 $(if $(CALIBRATION),--calibration $(CALIBRATION))

# The page of `tightfit explore` as a reader has it. Chromium is the system's: apt install chromium.
test-browser: $(READY)
	command -v chromium || command -v chromium-browser || command -v google-chrome
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -n 0 -m 'slow or not slow' tests/explorer/test_in_browser.py

# A part of the suite where a card is visible, with PyTorch's CUDA build: the suite's subject is the CPU all the same.
test-beside-card: $(CARD_READY)
	$(ON_CARD) -- $(CARD_BIN)/python -m pytest tests/test_calibration_of_the_suite.py tests/levers/test_tile.py \
	  tests/planner/test_step_figures.py tests/planner/test_least.py tests/test_cli_devices.py

# On CUDA's path, without a card: no card, driver or toolkit is needed; Linux and a C compiler are. Tests with true values
# leave numbers in memory, which operators without them would read as counts: they run in processes of their own.
# The last two lines: work of streams that nobody waits for happens late.
WITHOUT_VALUES := $(addprefix tests/card/test_,calibration.py casts.py copied_operands.py null_card.py operators.py \
  captured_bytes.py compiled_bytes.py plan_bytes.py recurrent_bytes.py stream_bytes.py)
# The peak of a whole training is its process's, and dynamo holds what another test's captured blocks were made from.
BY_THEMSELVES := $(addprefix tests/card/test_,grpo_on_card.py training_on_card.py)
IN_EVERY_ORDER := $(addprefix tests/card/test_,exact_on_card.py late.py stream_on_card.py)
BETWEEN_STREAMS := -k "not recompute and not repeatable"
test-card: $(CARD_READY)
	$(ON_CARD) -- $(CARD_BIN)/python -m pytest $(WITHOUT_VALUES) $(CARD_TESTS)
	$(ON_CARD) -- $(CARD_BIN)/python -m pytest $(BY_THEMSELVES) $(CARD_TESTS)
	$(ON_CARD) -- $(CARD_BIN)/python -m pytest tests/card $(addprefix --ignore=,$(WITHOUT_VALUES) $(BY_THEMSELVES)) \
	  $(CARD_TESTS)
	$(ON_CARD) --late side -- $(CARD_BIN)/python -m pytest $(IN_EVERY_ORDER) $(BETWEEN_STREAMS) $(CARD_TESTS)
	$(ON_CARD) --late main -- $(CARD_BIN)/python -m pytest $(IN_EVERY_ORDER) $(BETWEEN_STREAMS) $(CARD_TESTS)

# The same rules and the same bits on the card of this machine, with the kernels that compute (PYTHON: with the CUDA build).
# cuBLAS is told to keep to one workspace, without which it does not call itself repeatable.
ON_REAL_CARD := $(addprefix tests/card/test_,operators.py casts.py captured_bytes.py compiled_bytes.py \
  plan_bytes.py calibration.py)
REPEATABLE := $(addprefix tests/card/test_,exact_on_card.py recompute_by_hand.py stream_on_card.py experts.py)
test-real-card:
	TIGHTFIT_REAL_CARD=1 $(PYTHON) -m pytest $(ON_REAL_CARD) $(CARD_TESTS)
	TIGHTFIT_REAL_CARD=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON) -m pytest $(REPEATABLE) $(CARD_TESTS)

test-all: $(READY)
	$(BIN)/python -m pytest -m 'slow or not slow'
	$(MAKE) test-card CARD_TESTS="-m 'slow or not slow'" BETWEEN_STREAMS=

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
	rm -rf $(VENV) $(CARD) $(DOCS) $(RELEASE) runs site dist
