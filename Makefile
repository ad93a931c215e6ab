# Everything runs in .venv, which is made on first use; nothing needs to be activated. Settings, all optional:
#   PYTHON=python3.12   the interpreter .venv is made with (3.11 or 3.12)
#   ARGS="..."          arguments for `make up`, `make test` and `make ci-rehearsal`
#   JOBS=2              files of tests at a time, processes of mypy; JOBS=0: all in one process
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?=
ARGS ?=
JOBS ?= 2
export PYTHON

bin := .venv/bin
checks := lint types arch docs-check test
folders := engines converters slot_manager clients tests examples bench ci
scripts = $(shell grep -rlE '^#!/(bin/sh|usr/bin/env bash)' .ci ci)

# The stamps carry the checkout's path, which an editable install has inside too, so that a moved checkout installs anew.
here := $(shell pwd | cksum | cut -d' ' -f1)
runtime := .venv/.runtime-$(here)
dev := .venv/.dev-$(here)
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
made_with := $(call version,$(bin)/python)
usable := $(if $(made_with),$(if $(PYTHON),$(filter $(made_with),$(call version,$(PYTHON))),yes))

.PHONY: help setup up test check lint fix types arch docs docs-check bench ci-rehearsal soak lock clean list-checks again

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(runtime) $(dev) ## make .venv with everything in it

up: $(runtime) ## serve the base model and the example adapters until Ctrl-C (ARGS=--check: check the answers and stop)
	@$(bin)/lora-slots up $(ARGS)

test: $(runtime) $(dev) ## run all tests, those with a real Triton included
	$(if $(filter-out 0 1,$(JOBS)),REFERENCE_ENGINE_THREADS=1 OMP_NUM_THREADS=1) \
	$(bin)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(checks) ## what CI runs: lint, types, arch, docs-check and test

list-checks:
	@echo $(checks)

lint: $(dev) ## ruff: format and rules; shellcheck over the scripts, actionlint over the workflows
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/shellcheck -x $(scripts)
	PATH="$(CURDIR)/$(bin):$$PATH" $(bin)/actionlint

fix: $(dev) ## ruff, writing
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

types: $(runtime) $(dev) ## mypy, strict
	$(bin)/mypy --num-workers $(if $(filter-out 0,$(JOBS)),$(JOBS),1) $(folders)

arch: $(runtime) $(dev) ## import-linter: who may import whom
	$(bin)/lint-imports

docs: $(runtime) $(dev) ## write the generated parts of the documents
	$(bin)/python ci/docs.py

docs-check: $(runtime) $(dev) ## the generated parts are up to date, links lead somewhere
	$(bin)/python ci/docs.py --check

bench: $(runtime) $(dev) ## measure what the router adds, a conversion, a decision, and (if it is on PATH) aiperf's load on the gateway
	$(bin)/python bench/ensemble.py
	$(bin)/python bench/convert.py
	$(bin)/python bench/slots.py
	$(bin)/python bench/aiperf.py

ci-rehearsal: $(runtime) $(dev) ## the jobs of the workflows, here: real S3, real Triton; engines in dry run
	$(bin)/python ci/rehearse.py $(ARGS)

soak: $(runtime) $(dev) ## ten minutes of load with more adapters than slots, every answer checked
	$(bin)/python bench/soak.py $(ARGS)

lock: $(runtime) ## resolve requirements/*.txt anew
	ci/lock

clean: ## remove .venv and what tools left in the checkout
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(runtime): pyproject.toml ci/environment requirements/build.txt requirements/runtime.txt requirements/embedded.txt $(if $(usable),,again)
	@ci/environment runtime
	@touch $@

$(dev): $(runtime) requirements/dev.txt requirements/oracle.txt requirements/torch.txt
	@ci/environment dev
	@touch $@

again:
