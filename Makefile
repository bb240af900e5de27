# make demo   a PyG model on two processes, on a graph made on the spot
# make test   linter, type checker and daily tests, about 8 minutes: the core, and the conformance of each scheme
# make test-edge  full tests of schemes, extensions and tools, some minutes more
# make test-all  the same with the campaign: more cases, examples, programs of strangers and real graphs, more than two hours
# make test-install PYTHON=python3.12  what is built, in an empty environment of that Python: installed, and tried
# make docs   the site, in build/site, with the tutorials, which run for some minutes; a broken link is an error
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EDGE := $(filter-out %__pycache__/,$(wildcard tests/strategies/*/)) tests/extensions/ tests/tools/
TUTORIALS := $(patsubst docs/%.py,build/%.md,$(wildcard docs/tutorials/*.py))

.PHONY: demo test test-edge test-all test-only test-install lint docs clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint test-only

test-only: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not campaign" $(addprefix --ignore=,$(EDGE))

test-edge: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m "not campaign" $(EDGE)

test-all: lint
	LIGHTNING_GNN_TEST_ALL=1 $(BIN)/python -m pytest -n 2

test-install:
	.ci/install $(PYTHON)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/size.py
	$(BIN)/python .ci/language.py

docs: $(STAMP) $(TUTORIALS)
	$(BIN)/python docs/figures/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Run again only when it has changed.
build/tutorials/%.md: docs/tutorials/%.py | $(STAMP)
	$(BIN)/python docs/notebooks.py $(@D) $<

# Installed again only when what it installs has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
