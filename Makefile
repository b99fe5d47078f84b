# Everything a person types. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.locked

TABLE ?= 11
FIGURE ?=
MODEL ?=
DATASET ?=
ARGS ?=
KNOWN := TABLE FIGURE MODEL DATASET ARGS PYTHON VENV
$(foreach word,$(filter-out $(KNOWN),$(.VARIABLES)),$(if $(filter command,$(origin $(word))),$(error $(word)=$($(word)): make takes $(KNOWN), in capitals; all else stands in ARGS, as in make reproduce-table TABLE=5 ARGS="plan=true")))
SELECTED = $(if $(MODEL),model=$(MODEL)) $(if $(DATASET),dataset=$(DATASET)) $(ARGS)

.PHONY: help demo reproduce reproduce-table reproduce-figure claims report readme test test-processors test-all notebooks lint format hooks docs train-reference calibrate fit schedule budget benchmark benchmark-gpu dist environment clean

help: ## this list
	@echo 'QuickSilver. Targets (the first one that needs it makes $(VENV) from requirements.lock):'
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'Variables: TABLE=11  FIGURE=n  MODEL=gpt2-large  DATASET=wikitext103  ARGS="measure.latency.repeats=9 data.root=/folder"  PYTHON=python3.12'

demo: $(STAMP) ## one paragraph, dense and accelerated side by side, in half a minute (ARGS="save=0.5 model=reference-llama")
	@$(PY) -m quicksilver demo $(ARGS)

reproduce: $(STAMP) ## every table and figure: runs what has no record yet, goes on where it was stopped (MODEL, DATASET, ARGS)
	@$(PY) -m quicksilver reproduce all svg=true $(SELECTED)

reproduce-table: $(STAMP) ## run what a table of the paper still needs, print and write it (TABLE, MODEL, DATASET, ARGS)
	@$(PY) -m quicksilver reproduce table $(TABLE) $(SELECTED)

reproduce-figure: $(STAMP) ## the same for a figure (FIGURE, MODEL, DATASET, ARGS)
	@$(PY) -m quicksilver reproduce figure $(or $(FIGURE),$(error say which figure: make reproduce-figure FIGURE=8)) $(SELECTED)

claims: $(STAMP) ## every number the paper claims beside what the records at hand say; runs nothing (MODEL, DATASET, ARGS)
	@$(PY) -m quicksilver claims $(SELECTED)

report: $(STAMP) ## results/report/index.html, a site of all that was made, to be opened in a browser (ARGS)
	@$(PY) -m quicksilver report $(ARGS)

readme: $(STAMP) ## put the written tables and figures into README.md
	@$(PY) -m quicksilver dev readme

# pytest rewrites the asserts of every test file and keeps the result, unless bytecode is forbidden: seconds of each start.
test: $(STAMP) ## the tests, slow ones left out (ARGS for pytest)
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n auto --dist worksteal $(ARGS)

test-processors: $(STAMP) ## the tests marked `processor`, as if on four other processors (ARGS for pytest)
	PYTHONDONTWRITEBYTECODE= scripts/processors.sh $(PY) -m pytest -n auto -m 'processor and not slow' $(ARGS)

test-all: $(STAMP) ## all tests (ARGS for pytest)
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n auto --dist worksteal -m 'slow or not slow' $(ARGS)

notebooks: $(STAMP) ## run notebooks/ again and keep their outputs (ARGS)
	$(PY) scripts/run_notebooks.py $(ARGS)

lint: $(STAMP) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## write the code as `make lint` wants it
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

hooks: $(STAMP) ## ruff, mypy and a check of files before every commit
	$(PY) -m pre_commit install

docs: $(VENV)/.docs ## build the documentation with the API reference into site/, to be opened in a browser
	$(PY) -m mkdocs build --strict --quiet --site-dir $(VENV)/.site
	@$(PY) -c 'from quicksilver.files import publish_tree; publish_tree("$(VENV)/.site", "site")'
	@echo 'site/index.html (the search box needs a server: python3 -m http.server --directory site)'

train-reference: $(STAMP) ## train an embedded model again, hours (MODEL=reference-llama, or a rung of the ladder such as ladder-gpt2-1m)
	$(PY) scripts/train_reference.py $(or $(MODEL),reference-gpt2) $(ARGS)

calibrate: $(STAMP) ## thresholds from data, per layer (MODEL, DATASET, ARGS)
	@$(PY) -m quicksilver calibrate $(SELECTED)

fit: $(STAMP) ## maps that predict K and V of later layers, fitted to the model on calibration text (MODEL, ARGS)
	@$(PY) -m quicksilver fit $(SELECTED)

schedule: $(STAMP) ## which tokens stop where, chosen by KL on calibration text (MODEL, ARGS="save=[0.4,0.5] translators=[FILE]")
	@$(PY) -m quicksilver schedule $(SELECTED)

budget: $(STAMP) ## a dial set so that a budget holds (ARGS="save=0.3", or "cost=1 dial=fusion_attention"; MODEL, DATASET); alone: lists the dials
	@$(PY) -m quicksilver budget $(SELECTED)

benchmark: $(STAMP) ## what the runtime costs and saves on this machine, within ten minutes, into results/benchmarks/ (ARGS="full=true": all of it; ARGS="against=HEAD~20": is this code slower?)
	@$(PY) -m quicksilver dev benchmark $(ARGS)

benchmark-gpu: $(STAMP) ## the same on a CUDA device (ARGS); where only torch and transformers are: python scripts/benchmark_gpu.py
	$(PY) scripts/benchmark_gpu.py $(ARGS)

dist: $(STAMP) ## a wheel and a source archive in dist/, with conf/, experiments/, studies/ and the small reference models
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && \
	printf '[build]\nbuild_base=%s\n[egg_info]\negg_base=%s\n' "$$made" "$$made" > "$$made/setup.cfg" && \
	DIST_EXTRA_CONFIG="$$made/setup.cfg" $(PY) -c 'from setuptools import build_meta as made; made.build_sdist("dist"); made.build_wheel("dist")' \
	> "$$made/log" 2>&1 || { tail -20 "$$made/log"; exit 1; }
	@ls -sh dist/*

environment: $(STAMP) ## only make the virtual environment

clean: ## remove the virtual environment and caches; records and tables in results/ stay
	@test ! -e $(VENV) || test -f $(VENV)/pyvenv.cfg || { echo 'VENV=$(VENV) is no virtual environment: it is not removed.' >&2; exit 1; }
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f dist/quicksilver*
	test ! -f site/manifest.json || rm -rf site
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@echo 'results/ was left alone. Records took time to make; to remove them too: rm -r results/runs'

# The documentation's tools are no part of a run, so only `make docs` installs them.
$(VENV)/.docs: $(STAMP) requirements-docs.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.lock
	@touch $@

# A stamp, so that a warm environment costs nothing.
$(STAMP): requirements.lock pyproject.toml scripts/environment.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: install Python 3.11 or newer, or say which one: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and QuickSilver needs Python 3.11 or newer: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) scripts/environment.py $(VENV)
	@touch $@
