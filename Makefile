# Two commands: `make train` trains a hybrid world on synthetic Criteo rows, everything it sends
# compressed; `make test` runs everything that must pass.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/installed

.PHONY: train check test test-all notebooks install clean

train: install
	$(VENV)/bin/python -m dlrm_hybrid train +experiment=dct_levels

check: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check.sh --quick

test: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check.sh

test-all: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check.sh --all

notebooks: install
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt packaging/fbgemm-gpu-cpu/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet ./packaging/fbgemm-gpu-cpu --editable '.[dev]' --constraint constraints.txt
	$(VENV)/bin/python -m dlrm_hybrid doctor doctor.action=compile
	touch $@

clean:
	rm -rf $(VENV) runs
