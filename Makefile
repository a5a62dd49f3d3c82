# One way to check: `make check` and `make test`.  Both need only Python 3.11+; they create .venv on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: check format test parsers coverage accuracy fit openapi clean

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[test]'
	touch $@

check: $(BIN)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/yamllint -s -c deploy/yamllint.yaml deploy
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes.yaml

format: $(BIN)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 -q

# Rendered files before the frameworks' own parsers.
parsers: $(BIN)/.installed
	tests/parsers/install.sh .venv-parsers
	PLANNER_PARSERS_PYTHON=.venv-parsers/bin/python $(BIN)/python -m pytest -m "parsers or torch" -n 2 -q -rs

coverage: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 -q --cov --cov-report=term

# Rewrites docs/accuracy.md, its plots and the table that CI compares with.
accuracy: $(BIN)/.installed
	$(BIN)/python -m planner.accuracy.comparison.document

clean:
	rm -rf .venv .venv-parsers .venv-client build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

# Fits the published constants to the public runs again; writes them, the ranges and the validation.
fit: $(BIN)/.installed
	$(BIN)/python -m planner.accuracy.fits.refit

# Rewrites the committed description of the API, with which a test compares.
openapi: $(BIN)/.installed
	$(BIN)/python -m planner_api.openapi_file > api/openapi.json
