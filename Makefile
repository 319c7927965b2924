# Two commands do all the set-up: `make demo` and `make test`; `make test-slow` has the matrices.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow docs lint format clean
demo: $(INSTALLED)
	$(BIN)/lockstep demo

test: lint
	$(BIN)/pytest -q

# Matrices, and what takes minutes: all layouts to all layouts, verify at 2, 4 and 8 ranks, presets, long runs. On a
# machine that is starved some would never end; what is left out then is told.
test-slow: $(INSTALLED)
	$(BIN)/pytest -q -m slow --minutes 28 -rs

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

# Installs once; again only when pyproject.toml is newer than the last complete install.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Lockstep needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)')"
	$(PYTHON) -m venv .venv
	@echo "installing PyTorch and the rest into .venv: some minutes, once"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(INSTALLED)
