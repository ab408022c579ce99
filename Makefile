# Two targets are all that a learner needs: `make lab` and `make test`. `make help` lists the others.
#
#   LAB_ARGS="--no-browser --port=9000"   more options for JupyterLab
#   TESTS="tests/tensor/test_linear.py -k bias"  run only these tests
#   JOBS=4                                how many test processes run side by side (two per core, since many tests wait,
#                                         but one per core for whole chapters)
#   BUDGET=300                            how many seconds `make gpu-check` may take
#   CHECK_ARGS="--report FILE"            more options for it
#   SEED=7                                try the known mistakes of all exercises, with the inputs of this seed
#   PYTHON=python3.12                     which Python builds the environment
#   VENV=/some/where/else                 where the environment lives
#   VERSIONS="--upgrade"                  options for pip, in place of the pinned versions

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
LAB_ARGS ?=
CORES := $(shell getconf _NPROCESSORS_ONLN)
JOBS ?= $(shell echo $$(( $(CORES) * 2 )))
SEED ?=
BUDGET ?= 720
CHECK_ARGS ?=
LEFT_OUT ?= browser emulated_gpu notebooks
TESTS ?= tests $(addprefix --ignore tests/,$(LEFT_OUT))

VERSIONS ?= --constraint constraints.txt
WITHOUT ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := pyproject.toml constraints.txt

.NOTPARALLEL: # two targets could install into the same environment
.PHONY: help lab test test-browser test-emulated-gpu test-notebooks newest notebooks stale lint format book links picture bench gpu-check capstone clean

help: ## list the targets
	@sed -n -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

lab: $(STAMP) ## open the course in JupyterLab, on this machine only
	@exec $(BIN)/python -m tplab lab $(LAB_ARGS)

test: $(VENV)/.installed-test ## run every test except those of the next three targets; those that need a GPU run if there is one
	$(PYTEST) $(WITHOUT) $(TESTS)

test-browser: $(VENV)/.installed-test ## run the tests of notebooks and book in Chromium
	$(PYTEST) tests/browser

test-emulated-gpu: $(VENV)/.installed-test ## run the tests for GPUs on emulated ones (needs g++)
	$(PYTEST) tests/emulated_gpu

test-notebooks: JOBS := $(CORES)
test-notebooks: $(VENV)/.installed-test ## run every cell of every chapter, on CPUs and on emulated GPUs (needs g++)
	$(PYTEST) tests/notebooks

newest: ## run `make test` with the newest versions that pyproject.toml allows, in .venv-newest
	rm -f .venv-newest/.installed*
	$(MAKE) .venv-newest/.installed-test $(NEWEST)
	@echo "what differs from constraints.txt:"
	@.venv-newest/bin/python -m pip list --format freeze | grep -vxFf constraints.txt || true
	$(MAKE) test $(NEWEST)

notebooks: $(STAMP) ## execute solutions/*.py, write the notebooks, and try the tables of mistakes that have changed
	$(BIN)/python -m tplab build
	$(BIN)/python -m tplab.course.checks.known_mistakes

stale: $(STAMP) ## fail when a notebook no longer fits its source, or a table of mistakes wasn't tried with today's code
	$(BIN)/python -m tplab build --check
	$(BIN)/python -m tplab.course.checks.known_mistakes --check

lint: $(VENV)/.installed-test ## format, lint, types, and the order of the modules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	{ $(BIN)/mypy solutions/*.py || true; } | { ! grep -E '\[call-arg\]|error: Module "'; } # calls that a chapter can't make
	$(BIN)/lint-imports

format: $(VENV)/.installed-test ## put every file into the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

book: $(VENV)/.installed-test ## write the course as a web site for reading, to build/book (it takes some minutes)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/book
	@echo "the book is there: build/book/index.html"

links: $(VENV)/.installed-test ## ask every address that the book names whether it is still there (needs a network)
	$(BIN)/python -m sphinx -b linkcheck --quiet docs build/links

picture: $(STAMP) ## redraw the README's and the moving pictures (from real runs)
	$(BIN)/python -m pictures.first_minutes
	$(BIN)/python -m pictures.moving

bench: $(STAMP) ## time launch() and an MLP beside torch's own (a few minutes)
	$(BIN)/python -m benchmarks.peers

gpu-check: ## run what a GPU should tell us, in order of worth, in 12 minutes; called again, it goes on
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m benchmarks.gpu_check --seconds $(BUDGET) $(CHECK_ARGS)

capstone: $(STAMP) ## train a GPT on two ranks of this machine and write its report, runs/laptop/report.html (10 minutes)
	$(BIN)/python -m tplab.capstone study --preset laptop
	$(BIN)/python -m tplab.capstone report runs/laptop

clean: ## remove the environment and everything that the tools leave
	rm -rf $(VENV) .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

NEWEST := VENV=.venv-newest VERSIONS="--upgrade --upgrade-strategy eager" WITHOUT='-m "not pinned"' SEED=1

# The tests start hundreds of Pythons. Each would compile tplab again, so they write what they compile
unexport PYTHONDONTWRITEBYTECODE

PYTEST = TPLAB_TEST_SEED=$(SEED) $(BIN)/python -m pytest -p no:nbval -n $(JOBS) --dist loadgroup --no-loadscope-reorder

# The environment. Each stamp file is newer than the files that the installed versions were read from.

define find_python
python=""; \
for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python3.14 python); do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$candidate"; break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo; echo "This course needs Python 3.11 or newer, and $(if $(PYTHON),$(PYTHON) is not that,none was found)."; \
	echo "Install one (https://www.python.org/downloads, or 'apt install python3 python3-venv', or 'brew install python'),"; \
	echo "or name the one you have: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; \
fi; \
if ! "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	echo; echo "$$("$$python" --version) is here, but without its venv module. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; \
fi
endef

# $(call install,WHAT,OPTIONS): pip, usually with the tested versions, and one sentence that says what to look at when it fails.
define install
$(BIN)/python -m pip install $(2) $(VERSIONS) --editable "$(1)" || { \
	echo; echo "pip could not install the packages; its own message stands above."; \
	echo "If it names a connection or a timeout, this machine can't reach the package index: check the network or the proxy."; \
	echo "If it names 'No space left', free about 6 GB. Then run make $(MAKECMDGOALS) again: it goes on where it stopped."; exit 1; }; \
$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (ipykernel)" >/dev/null
endef

$(BIN)/python:
	@$(find_python); \
	echo "making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV) || { echo; echo "$(VENV) could not be made: is this folder writable, and is there space on the disk?"; exit 1; }

$(STAMP): $(PINS) | $(BIN)/python
	@echo "installing the course into $(VENV) (once; PyTorch is large, so this takes some minutes)"
	@$(call install,.)
	@touch $@

$(VENV)/.installed-test: $(PINS) | $(BIN)/python
	@echo "installing the course and what its tests need into $(VENV) (once; this takes some minutes)"
	@$(call install,.[test],--no-compile) # a module is compiled when it's first imported; all would take half a minute
	@touch $(STAMP) $@
