# Everything runs in a local .venv made from requirements/cpu.lock; each target makes it when it is not there.
PYTHON ?= python3
SEEDS ?= 0
ENGINE ?= hf
SCRATCH ?= 0
VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
READY := $(VENV)/.ready
TORCH := torch==2.13.0+cpu

# a failing pip stops make, although its output is filtered
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install packages quickstart papers test test-all lint docs wheel clean
.DELETE_ON_ERROR:

install: $(READY)
	@echo "Ready. Next: source $(VENV)/bin/activate, then sparse-rl doctor RECIPE; or make quickstart (5 minutes)"

packages: $(VENV)/.packages

quickstart: $(READY)
	@$(BIN)/python -m sparse_rl.cli quickstart --seeds $(SEEDS) --engine $(ENGINE) $(if $(filter 1,$(SCRATCH)),--scratch)

papers: $(READY)
	@$(BIN)/python benchmarks/papers.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --durations 10

test-all: $(READY)
	$(BIN)/python -m pytest -n 2 --durations 20 -m ""

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile Dockerfile.cuda

docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "Open site/index.html"

wheel: $(READY)
	@$(BIN)/python -m build --no-isolation --quiet
	@ls -t dist/* | head -2

$(READY): $(VENV)/.packages pyproject.toml
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.packages: requirements/cpu.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 2; }
	@echo "Setting up $(VENV): $(TORCH), vLLM, TRL, transformers and what they need, $$(grep -c == $<) packages" \
	  "pinned in $< (4 GB; minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --no-deps "$(TORCH)" || \
	  $(BIN)/pip install -qq --no-deps "$(TORCH)" --index-url https://download.pytorch.org/whl/cpu
	@$(BIN)/pip install --no-deps -r requirements/cpu.lock 2> >(grep -v ^WARNING >&2) | awk '/^Installing/ { print "installing them" } \
	  /^Collecting/ && ++n % 25 == 0 { print n, "packages read" } { fflush() }'
	@touch $@

$(DOCS)/.ready: requirements/docs.lock
	@echo "Setting up $(DOCS): MkDocs and what it needs, $$(grep -c == $<) packages pinned in $<"
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install -qq --no-deps -r $<
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
