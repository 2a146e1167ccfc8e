# Two commands do all the set-up on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test
ALL_STAMP := $(VENV)/.installed-all
export PYTHONUNBUFFERED := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install demo test test-all soak check format clean

install: $(RUN_STAMP)

$(RUN_STAMP): pyproject.toml requirements/run.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) run
	@touch $@

$(TEST_STAMP): $(RUN_STAMP) requirements/test.txt requirements/eval.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) test
	@touch $@

$(ALL_STAMP): $(TEST_STAMP) requirements/all.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) all
	@touch $@

demo: $(RUN_STAMP)
	$(BIN)/unbroken demo $(DEMO)

# The fast tests and the checks: at most ten minutes on two cores.
test: $(TEST_STAMP)
	bash scripts/test.sh $(BIN) fast

# Everything: servers, soaks, testbeds, browsers. Skips, with the reason, what this machine cannot have.
test-all: $(ALL_STAMP)
	bash scripts/test.sh $(BIN) all

# The fuzzers of readers and protocols, ten times as long as in `make test`.
soak: $(TEST_STAMP)
	UNBROKEN_FUZZ_TIMES=$${UNBROKEN_FUZZ_TIMES:-10} $(BIN)/pytest -q -m fuzz

check: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
