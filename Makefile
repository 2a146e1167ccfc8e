# Two commands do all the set-up on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
TEST_STAMP := $(VENV)/.installed-test
ALL_STAMP := $(VENV)/.installed-all
EVAL_STAMP := $(VENV)/.installed-eval
export PYTHONUNBUFFERED := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: install install-eval install-all install-hooks demo test test-all breakers soak check format clean

install: $(RUN_STAMP)

$(RUN_STAMP): pyproject.toml requirements/run.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) run
	@touch $@

# `unbroken eval` on the harness's tasks and Hugging Face models: 0.6 GB and a minute more.
install-eval: $(EVAL_STAMP)

# Everything that any command or test can use.
install-all: $(ALL_STAMP)

# Trainers that want GPUs (torchtitan, DeepSpeed, Megatron), for the tests that run them on a CPU; torchtitan wants an older datasets.
install-hooks: $(ALL_STAMP)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-deps --no-build-isolation -r requirements/hooks-components.txt
	bash scripts/megatron.sh $(VENV)

$(EVAL_STAMP): $(RUN_STAMP) requirements/install-eval.txt requirements/eval.txt requirements/models.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) install-eval
	@touch $@

$(TEST_STAMP): $(RUN_STAMP) requirements/test.txt requirements/eval.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) test
	@touch $@

$(ALL_STAMP): $(TEST_STAMP) requirements/all.txt requirements/models.txt requirements/hooks.txt
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) all
	@touch $@

demo: $(RUN_STAMP)
	$(BIN)/unbroken demo $(DEMO)

# The fast tests and the checks: at most ten minutes on two cores.
test: $(TEST_STAMP)
	bash scripts/test.sh $(BIN) fast

# Everything of at most 45 minutes but `make breakers`: servers, testbeds, browsers. Skips, with the reason, what
# this machine cannot have.
test-all: $(ALL_STAMP)
	bash scripts/test.sh $(BIN) all

# The breaker's list: each fault that real use found, in each place of the checkpoints, under each launcher.
breakers: $(TEST_STAMP)
	PYTHONHASHSEED=0 $(BIN)/pytest -q -m breakers -n 2

# What takes hours: the campaign of 500 rounds, 100 kills, half an hour without a false alarm, fuzzers for ten minutes.
soak: $(ALL_STAMP)
	bash scripts/soak.sh $(BIN)

check: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
