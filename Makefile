# Two commands are all: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
SIDE_BY_SIDE := -m "not e2e" -p no:cacheprovider -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
DEMO_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

# Tests start many processes, each of which would compile all of the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test coverage test-e2e check pages docs build bench-methods setup clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,flower,live,notebook,privacy,ray,tracking]'
	touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/coterie compare examples/demo.toml --methods local,fedavg,fedper,ifca:k=4,fedclust,user-centric:streams=auto,oracle --dir $(DEMO_DIR)

# All tests but the long ones. Each worker takes whole files, or the groups of tests/conftest.py;
# WORKERS=1 for a busy machine.
test: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The same, counting lines and branches in the workers and in the processes that tests start.
coverage: setup
	$(BIN)/python -m coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/.coverage \
		$(BIN)/python -m pytest $(SIDE_BY_SIDE) -o timeout=900
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=85

# The long ones: real federations, clusters and whole runs. COTERIE_DATA is the folder of the public
# data sets' files; tests that need them are skipped without it.
test-e2e: setup
	$(BIN)/python -m pytest -m e2e tests

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What is made from the code: the index of names, the pages of methods, commands, Python.
pages: setup
	$(BIN)/python docs/index_of_names.py
	$(BIN)/python docs/methods_pages.py
	$(BIN)/python docs/reference_pages.py

# The documentation as a site, in site/; fails at a link that leads nowhere. The variable is about
# a note of Material's on its own future, which is no warning about these pages.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The source distribution and the wheel, in dist/.
build: setup
	$(BIN)/python -m hatchling build

# All methods on Fashion-MNIST, within an hour on two cores; call it again to go on where it stopped.
# COTERIE_DATA is the folder of the data set's files; without it they are downloaded.
bench-methods: setup
	$(BIN)/python benchmarks/methods.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .coverage*
