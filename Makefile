# The short forms. `make quick` and `make test` set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
# Runs and tests have set-ups of their own. For runs with all members of parity: make setup EXTRAS=notebooks,nvidia,inference,compiled,parity
EXTRAS ?= notebooks,nvidia,inference,xla
SETUP := .venv/.ready
TESTS := .venv/.ready-test
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# Jupyter refuses root without this; in a container there is often no other user.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: quick nightly weekend baseline report lab explorer test pytest lint setup simulated system

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	@echo "setting up .venv: fetches torch and Jupyter, takes minutes; only once"
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

$(TESTS): $(SETUP)
	@echo "adding to .venv what lint and tests need"
	$(PIP) --editable '.[test]'
	@touch $@

quick nightly weekend: $(SETUP)
	$(BIN)/benchlib run $@ $(ARGS)

# make baseline RUN=outputs/... REASON="..."
baseline: $(SETUP)
	$(BIN)/benchlib baseline accept $(RUN) --reason "$(REASON)"

report: $(SETUP)
	$(BIN)/benchlib report $(ARGS)

# On copies in lab/, which git ignores: running or changing one leaves no trace. Delete one to get it anew. The root is the
# checkout, so that links from a notebook to its report work.
lab: $(SETUP)
	@mkdir -p lab && for path in notebooks/*.ipynb; do test -e lab/$${path##*/} || cp $$path lab/; done
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/lab $(ROOT) $(ARGS)

# The history with its explorer in the browser, without code.
explorer: $(SETUP)
	$(PIP) --quiet --editable '.[voila]'
	JUPYTER_PATH=$(CURDIR)/binder/page $(BIN)/voila notebooks/90_history.ipynb --template=benchlib $(ARGS)

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The linters beside the tests: mypy takes a minute of one core, and tests wait for each other now and then.
test: $(TESTS)
	$(MAKE) --no-print-directory --jobs=2 lint pytest

# Three tests at a time, see conftest.py; `make test ARGS='-n 0 tests/unit'` runs some of them, one at a time.
pytest: $(TESTS)
	$(BIN)/python -m pytest -n 3 --nbval --nbval-current-env $(ARGS)

# Whole benchmarks on a simulated CUDA device, and every synchronisation removed in turn: four minutes and more.
simulated: $(TESTS)
	BENCHLIB_SIMULATED=1 $(BIN)/python -m pytest -n 2 tests/simulated $(ARGS)
	$(BIN)/python scripts/remove_synchronisations.py

# As root: the Debian packages of the tests that join two hosts by a cable, and of the one that runs a job through SLURM.
# Without them those tests are SKIPPED.
system:
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends iperf3 iproute2 \
		munge slurm-client slurmctld slurmd
