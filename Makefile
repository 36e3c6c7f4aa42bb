# One command each: `make run` sets up and runs the main job, `make test` sets up and runs the tests.
# `make slurm` runs those that need a Slurm, and installs one.
#
#   PYTHON=python3.12 make setup     another interpreter (3.11 or newer)
#   STUDY=my.toml make run           another study

PYTHON ?= python3
STUDY  ?= studies/jets.toml
SITE   ?= local
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: setup run test slurm lint bench clean

setup: $(VENV)/.n3lo-installed

run: setup
	$(BIN)/python run_workflow.py "$(STUDY)" --site $(SITE)

# Two files of tests at a time: much of each is waiting for programs to start.
test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slurm"

# Studies on a real Slurm of this host; as root, on Debian or Ubuntu.
slurm: setup
	command -v slurmctld >/dev/null || (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge libpmix-dev >/dev/null)
	$(BIN)/python -m pytest -m slurm tests/test_slurm.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/jets_baseline.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info

# Each step leaves a file when it is done, so that a second `make` repeats none.
$(VENV)/.python-installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "N3LO needs Python 3.11 or newer: PYTHON=python3.12 make setup")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel 'cmake<4'
	$(PIP) --editable '.[mpi,dev]'
	touch $@

$(VENV)/.n3lo-installed: $(VENV)/.python-installed install_horovod.sh
	sh install_horovod.sh $(BIN) constraints.txt
	touch $@
