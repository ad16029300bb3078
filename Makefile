# Two commands do everything, the set-up included; it is done once, and again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTEST_ARGS ?=

python := $(VENV)/bin/python
install := $(python) -m pip install --disable-pip-version-check -qq -c constraints.txt

.PHONY: help train test test-ray test-processors quick lint format docs clean
.DEFAULT_GOAL := help

help:
	@echo 'make train [ARGS="key=value ..."]   train; without ARGS, PPO on CartPole-v1   (python -m rlframe.launch)'
	@echo 'make test [PYTEST_ARGS="..."]       ruff, pyrefly and the fast tests, in 2 to 8 minutes'
	@echo 'make test-ray                       tests of samplers, replay and trials in actors of Ray, in 2 minutes'
	@echo 'make test-processors                the fast tests as on other processors, in 15 minutes'
	@echo 'make quick                          ruff and a part of the tests, in 45 s'
	@echo 'make lint                           ruff and pyrefly only'
	@echo 'make format                         let ruff rewrite the files'
	@echo 'make docs                           build the docs site into site/'
	@echo 'make clean                          remove $(VENV) and caches; runs under data/ stay'
	@echo 'PYTHON=python3.12 chooses the interpreter (3.11 or newer), VENV=DIR the virtual environment.'

# exec: the training itself gets Ctrl-C, ends in its own time, and make reports its failure.
train: $(VENV)/.installed-train
	@exec $(python) -m rlframe.launch $(ARGS)

# Three test processes for two cores: some tests wait.
workers = $$($(python) -c 'import os; print(3 * (os.cpu_count() or 1) // 2 or 1)')
# Bytecode is written, whatever the environment says: the commands that tests start would compile every file again.
pytest = env -u PYTHONDONTWRITEBYTECODE $(python) -m pytest -q -n $(workers) --dist worksteal

test: $(VENV)/.installed-dev
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(VENV)/bin/pyrefly check --summary=none --python-interpreter-path $(python)
	@$(pytest) $(PYTEST_ARGS)

# A cluster for each file, of processes of its own, which wait most of the time.
test-ray: $(VENV)/.installed-ray
	@$(python) -m pytest -q -m ray -n 2 --dist loadfile $(PYTEST_ARGS)

# The instructions of older processors; Intel's without the setting that rlframe makes for MKL; rounding by batch size.
processors = ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR= OTHER_BITS=1

test-processors: $(VENV)/.installed-dev
	@status=0; for setting in $(processors); do \
		echo "== $$setting"; env $$setting $(pytest) $(PYTEST_ARGS) || status=1; \
	done; exit $$status

# Pure functions, configurations, layers, and one short run of each kind.
quick: $(VENV)/.installed-dev
	@$(python) -m ruff check .
	@$(pytest) -m 'quick and not slow and not gpu' $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@$(VENV)/bin/pyrefly check --summary=none --python-interpreter-path $(python)

format: $(VENV)/.installed-dev
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

# The variable hides a notice about the next major version of mkdocs.
docs: $(VENV)/.installed-dev
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet
	@echo 'Open site/index.html.'

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist site
	find rlframe tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit("rlframe needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-train: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing rlframe into $(VENV) (once; a few minutes)'
	@$(install) -e '.[atari,plot,video]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing rlframe and the development tools into $(VENV) (once; a few minutes)'
	@$(install) -e '.[dev]'
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	@echo 'Installing Ray into $(VENV) (once)'
	@$(install) -e '.[dev,ray,tune]'
	@touch $@
