# Every target does its own set-up: a fresh machine needs Python 3.11 or newer, make and nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RUNS ?= runs
OUT ?= analysis/output

.DEFAULT_GOAL := help
.PHONY: help table1 test test-all lint docs tables figures report check-report claims bench gpu-check clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bnb,eval,slurm]'
	@touch $@

table1: $(STAMP) ## run Table 1 at smoke scale (16 tiny arms, about two minutes) and print it; THREADS=1 beside busy neighbours
	$(PY) -m sonar_repro +experiment=table1 runs_dir=$(RUNS) $(if $(THREADS),threads=$(THREADS))
	$(PY) -m analysis tables --runs $(RUNS) --out $(OUT) --table table1 --scale smoke --print

test: $(STAMP) lint ## lint, types and the tests (2 cores: about 8 minutes)
	$(PY) -m pytest -n 2 --dist worksteal

test-all: $(STAMP) lint ## the long sweeps too: every model class, all pairs of axes; with the coverage of each file
	$(PY) -m pytest -n 2 --dist worksteal -m "" --cov=sonar_repro --cov=analysis --cov-report=term:skip-covered

lint: $(STAMP) ## ruff (check and format) and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

docs: $(STAMP) ## the documentation as a site, strict; its tables are made from the committed records
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

tables: $(STAMP) ## every table from the records: printed, and as Markdown, LaTeX, CSV
	$(PY) -m analysis tables --runs $(RUNS) --out $(OUT) --print

figures: $(STAMP) ## every figure from the records: PDF and PNG
	$(PY) -m analysis figures --runs $(RUNS) --out $(OUT)

report: $(STAMP) ## one self-contained HTML page with everything
	$(PY) -m analysis report --runs $(RUNS) --out $(OUT)

check-report: $(STAMP) ## open the report in headless Chromium, at a phone's width and a wide screen
	$(PY) tests/support/browser.py --out $(OUT)

claims: $(STAMP) ## the papers' sentences against the records: holds, fails, not measured
	$(PY) -m analysis claims --runs $(RUNS) --out $(OUT)

bench: $(STAMP) ## speed: ratios within one run, and the commands' wall times
	$(PY) tests/bench --out $(OUT)/bench.json

# With WHEELS (a folder with wheels of hydra-core, omegaconf and antlr4) this machine's own python, torch and transformers
# are used and nothing is installed; GPU_CHECK passes options, as GPU_CHECK=--dry.
gpu-check: $(if $(WHEELS),,$(STAMP)) ## prove the paper scale on this machine's GPU: at most 8 minutes, one tar file
	$(if $(WHEELS),$(PYTHON),$(PY)) -m sonar_repro.gpu_check $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_CHECK)

clean: ## remove the environment and what was rebuilt from records (never the records)
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .ruff_cache
