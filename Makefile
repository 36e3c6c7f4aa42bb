# One command each: `make run` sets up and runs the main job, `make test` sets up and runs the tests.
# Those on a real Slurm, and those in a browser, need root, and Debian or Ubuntu, to install it.
#
#   PYTHON=python3.12 make setup     another interpreter (3.11 or newer)
#   STUDY=my.toml make run           another study

PYTHON ?= python3
STUDY  ?= studies/jets.toml
SITE   ?= local
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: setup run test long slurm browser programs lint docs lowest newest bench clean

setup: $(VENV)/.n3lo-installed

run: setup
	$(BIN)/python run_workflow.py "$(STUDY)" --site $(SITE)

# Two files at a time, the longest first (conftest.py): much of each is waiting for programs to start.
TESTS := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
ifeq ($(shell id -u),0)
test: setup lint programs
	$(TESTS) -m "not long"
	@echo "left out: further examples of what was tested ('make long')"

long: setup programs
	$(TESTS) -m long
else
test: setup lint
	$(TESTS) -m "not long and not slurm and not browser"
	@echo "left out: the tests on a real Slurm ('sudo make slurm'), in Chromium ('make browser'), and further examples ('make long')"

long: setup
	$(TESTS) -m "long and not slurm"
endif

slurm: setup programs
	$(BIN)/python -m pytest -m slurm

browser: setup
	$(BIN)/python -m pytest -m browser

APT := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq
programs:
	{ command -v slurmctld && command -v munged && command -v chromium && command -v rsync; } >/dev/null || { apt-get update -qq && $(APT) slurm-wlm munge libpmix-dev >/dev/null && $(APT) --no-install-recommends chromium fonts-dejavu-core rsync >/dev/null; }

lint: $(VENV)/.python-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.python-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# With the lowest versions that pyproject.toml allows, tests of what plans, searches, reads and shows;
# with the newest there are, all quick tests.
CORE := $(addprefix tests/test_,$(addsuffix .py,study contract space gaussian search surrogate ledger tables data flat observables search_figures machine_figures))
lowest: $(VENV)/.python-installed
	$(BIN)/python lowest_versions.py >$(VENV)/lowest.txt
	$(PYTHON) -m venv $(VENV)/lowest
	$(VENV)/lowest/bin/pip install --quiet --constraint $(VENV)/lowest.txt --editable '.[run,mpi,optuna]' pytest pyyaml
	$(VENV)/lowest/bin/python -m pytest -m "not mpi and not long" $(CORE)

newest:
	$(PYTHON) -m venv $(VENV)/newest
	$(VENV)/newest/bin/pip install --quiet --upgrade --editable '.[run,mpi,dev]'
	$(VENV)/newest/bin/python -m pytest -m "not slurm and not browser and not campaign and not mpi and not long"

bench: setup
	$(BIN)/python benchmarks/jets_baseline.py

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache *.egg-info

# Each step leaves a file when it is done, so that a second `make` repeats none.
$(VENV)/.python-installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "N3LO needs Python 3.11 or newer: PYTHON=python3.12 make setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel 'cmake<4'
	$(PIP) --editable '.[run,mpi,dev]'
	touch $@

$(VENV)/.n3lo-installed: $(VENV)/.python-installed install_horovod.sh
	sh install_horovod.sh $(BIN) constraints.txt
	touch $@
