# `make help` lists the targets. Everything is installed into $(VENV); nothing outside it changes.
#
# Variables: PYTHON (interpreter to build the environment with), VENV, PIP_FLAGS (for example
# "--index-url URL" or "--no-index --find-links DIR"), NPROC (ranks of quickstart;
# default: one per GPU, else two), PACKAGE (deepspeed or megatron-core) and MINORS of releases
# (default: all), PYTEST_ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/cpu-py311.txt
PIP_FLAGS ?=
PYTEST_ARGS ?=
PACKAGE ?= deepspeed
# The first of these that runs and is new enough (a pyenv shim may exist and yet not run).
PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c \
	'import sys; sys.version_info >= (3, 10) and print("$(p)")' 2>/dev/null)))

.PHONY: help quickstart test releases lint format schema install clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   install, then train a small LLaMA in FP4 beside its BF16 twin (minutes)"
	@echo "make test         install what the tests need and run all of them"
	@echo "make releases     test what hooks into a framework on each of its minors (PACKAGE=megatron-core)"
	@echo "make lint         ruff, mypy --strict, import-linter"
	@echo "make format       let ruff format and mend what it can"
	@echo "make schema       write configs/schema/fp4.schema.json from the code"
	@echo "make install      the environment alone: $(VENV)"
	@echo "make clean        remove the environment, caches and runs/"

quickstart: $(VENV)/.run-installed
	$(BIN)/fp4 pretrain --preset tiny --steps 100 --twin $(if $(NPROC),--nproc $(NPROC)) \
		--config configs/quickstart.json --output runs/quickstart

# Two workers; tests of ranks with limits of seconds all go to one of them (see tests/conftest.py).
test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Each release is installed beside this environment, which stays as it is.
releases: $(VENV)/.dev-installed
	$(BIN)/python scripts/check_releases.py --package $(PACKAGE) $(if $(MINORS),--minors $(MINORS))

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/.run-installed
	$(BIN)/fp4 config schema --output configs/schema/fp4.schema.json

install: $(VENV)/.run-installed

clean:
	rm -rf .venv build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. If $(PYTHON) has a torch that sees a GPU, that torch is the one to train with: its
# build fits the driver, and the tested CPU set would hide it. The environment then looks through to
# the system's packages, and the only constraint is that torch stays as it is. Otherwise the tested
# set is installed, torch first and alone, so that no later package can bring another torch.
# Debian without python3-venv has no ensurepip: there pip is installed into the environment from outside.
$(VENV)/.created:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "fp4-plugin needs Python >= 3.10, and '$(or $(PYTHON),python3)' is older or does not run." \
		"Install python3.11, or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	gpu_torch=$$($(PYTHON) -c 'import torch; print(torch.__version__ if torch.cuda.is_available() else "")' \
		2>/dev/null || true); \
	site=$${gpu_torch:+--system-site-packages}; \
	$(PYTHON) -m venv $$site $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv $$site --without-pip $(VENV); \
		$(PYTHON) -m pip --python $(BIN)/python install $(PIP_FLAGS) -q pip; }; \
	if [ -n "$$gpu_torch" ]; then \
		echo "using the installed torch $$gpu_torch, which sees a GPU"; \
		echo "torch==$$gpu_torch" >$(VENV)/constraints.txt; \
	else \
		cp $(CONSTRAINTS) $(VENV)/constraints.txt; \
		$(BIN)/python -m pip install $(PIP_FLAGS) -q "$$(grep '^torch==' $(CONSTRAINTS))" -c $(CONSTRAINTS); \
	fi
	touch $@

# $(call pip_install,EXTRAS)
pip_install = $(BIN)/python -m pip install $(PIP_FLAGS) -q -e '.[$(1)]' -c $(VENV)/constraints.txt

$(VENV)/.run-installed: $(VENV)/.created pyproject.toml
	$(call pip_install,deepspeed$(comma)hf$(comma)plot)
	touch $@

$(VENV)/.dev-installed: $(VENV)/.run-installed $(CONSTRAINTS) Makefile
	$(call pip_install,deepspeed$(comma)hf$(comma)megatron$(comma)plot$(comma)dev)
	touch $@

comma := ,
