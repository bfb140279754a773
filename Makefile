# The short forms. `make quick` and `make test` set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.ready

.PHONY: quick nightly weekend baseline report lab explorer test lint setup system

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

quick nightly weekend: $(SETUP)
	$(BIN)/benchlib run $@ $(ARGS)

# make baseline RUN=outputs/... REASON="..."
baseline: $(SETUP)
	$(BIN)/benchlib baseline accept $(RUN) --reason "$(REASON)"

report: $(SETUP)
	$(BIN)/benchlib report $(ARGS)

lab: $(SETUP)
	$(BIN)/jupyter lab notebooks

# The history with its explorer in the browser, without code cells.
explorer: $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[voila]'
	$(BIN)/voila notebooks/90_history.ipynb $(ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two tests at a time, see conftest.py; `make test ARGS='-n 0 tests/unit'` runs some of them, one at a time.
test: $(SETUP) lint
	$(BIN)/python -m pytest -n 2 --nbval --nbval-current-env $(ARGS)

# As root: the Debian packages of the tests that join two hosts by a cable, and of the one that runs a job through SLURM.
# Without them those tests are SKIPPED.
system:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iperf3 iproute2 \
		munge slurm-client slurmctld slurmd
