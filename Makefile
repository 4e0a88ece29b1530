# Two commands: `make train` trains a hybrid world on made-up Criteo rows, everything it sends
# compressed; `make test` runs everything that must pass.
# A machine with a GPU: make FBGEMM= train
PYTHON ?= python3
VENV := .venv
FBGEMM ?= ./packaging/fbgemm-gpu-cpu
STAMP := $(VENV)/installed

.PHONY: train test test-all install clean

train: install
	$(VENV)/bin/python -m dlrm_hybrid train +experiment=dct_hybrid

test: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check.sh

test-all: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/check.sh --all

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt packaging/fbgemm-gpu-cpu/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(FBGEMM) --editable '.[dev]' --constraint constraints.txt
	touch $@

clean:
	rm -rf $(VENV) runs
