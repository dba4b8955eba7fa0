# Every target makes what it needs: a virtual environment in .venv, with loaderd installed from this folder. With another
# Python, in another folder: make test PYTHON=python3.10 VENV=.venv-3.10

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BENCH := .venv-bench/bin
RAY := .venv-ray/bin
# With an NVIDIA GPU, TensorFlow with its CUDA libraries; without one, the smaller build for CPUs.
GPU := $(shell nvidia-smi --list-gpus 2>/dev/null)
TENSORFLOW := $(if $(GPU),tensorflow[and-cuda]>=2.18,tensorflow-cpu>=2.18)
TORCH ?= torch
JAX ?= $(if $(GPU),jax[cuda13],jax)
NVML := $(if $(GPU),nvidia-ml-py)
PIP := -m pip install --quiet --disable-pip-version-check
SETUP := setup.cfg pyproject.toml
NEW_ENVIRONMENT = @$(PYTHON) -m venv $(@D) || { echo "python3 cannot make virtual environments (Debian: apt-get install python3-venv)"; exit 1; }

export TF_CPP_MIN_LOG_LEVEL ?= 2
unexport PYTHONDONTWRITEBYTECODE  # where it is set, every process that is started would compile all modules anew

.PHONY: help demo demo-chess demo-go demo-gpu demo-lc0 demo-mnist demo-nnue demo-ray demo-shogi test test-gpu test-ray test-torch torture newest compat lint docs package bench clean

help: ## what can be made
	@sed -n 's/^\([a-z0-9-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST)

demo: $(VENV)/made-demo ## what loaderd does for you, measured here in a minute: speed beside tf.data, kills, damage, resume
	$(BIN)/python examples/demo/demo.py --out demo/minute

demo-chess: $(VENV)/made-demo ## write chess shards from games played by the rules, and train a net on them
	$(BIN)/python examples/chess/make_shards.py --out demo/shards
	$(BIN)/python examples/chess/train.py --data demo/shards --out demo/run

demo-lc0: $(VENV)/made-demo ## Leela Chess Zero's program plays against itself, and a net learns of the tars
	ls demo/lc0/games/validation-*.tar >/dev/null 2>&1 || $(BIN)/python examples/lc0/make_tars.py --out demo/lc0/games
	$(BIN)/python examples/lc0/train.py --data demo/lc0/games --out demo/lc0/run

demo-go: $(VENV)/made-demo ## games of Go in KataGo's layout, and a net that learns of them
	ls demo/go/games/validation-*.npz >/dev/null 2>&1 || $(BIN)/python examples/go/make_npz.py --out demo/go/games
	$(BIN)/python examples/go/train.py --data demo/go/games --out demo/go/run

demo-mnist: $(VENV)/made-demo ## handwritten digits, and several towers with a batch each
	$(BIN)/python examples/mnist/make_shards.py --out demo/mnist/shards
	$(BIN)/python examples/mnist/train.py --data demo/mnist/shards --out demo/mnist/run

demo-nnue: .venv-torch/made ## chess boards as bullet reads them, and an NNUE in PyTorch that learns of them
	ls demo/nnue/boards/validation*.bin >/dev/null 2>&1 || .venv-torch/bin/python examples/nnue/make_shards.py --out demo/nnue/boards
	.venv-torch/bin/python examples/nnue/train.py --data demo/nnue/boards --out demo/nnue/run

demo-shogi: .venv-torch/made ## shogi positions as dlshogi reads them, and a net with two heads in PyTorch that learns of them
	ls demo/shogi/positions/validation*.hcpe >/dev/null 2>&1 || .venv-torch/bin/python examples/shogi/make_shards.py --out demo/shogi/positions
	.venv-torch/bin/python examples/shogi/train.py --data demo/shogi/positions --out demo/shogi/run

demo-gpu: $(VENV)/made .venv-torch/made ## networks in PyTorch, JAX and Keras, each fed in three ways: how busy is the GPU? Without one: how long does a step wait?
	ls demo/gpu/shards/*/*.tfrecord >/dev/null 2>&1 || $(BIN)/python examples/gpu/make_shards.py --out demo/gpu/shards --records $(if $(GPU),8000000,200000)
	.venv-torch/bin/python examples/gpu/torch_train.py --data 'demo/gpu/shards/*/*.tfrecord'
	.venv-torch/bin/python examples/gpu/jax_train.py --data 'demo/gpu/shards/*/*.tfrecord'
	$(BIN)/python examples/gpu/keras_train.py --data 'demo/gpu/shards/*/*.tfrecord'

demo-ray: .venv-ray/made ## the same shards served on a Ray cluster of this machine: a loop, and a training of two workers
	$(RAY)/python examples/chess/make_shards.py --out demo/shards
	$(RAY)/python examples/ray/loop.py
	$(RAY)/python examples/ray/train.py --out demo/ray

# They look at what frameworks do on the CPU: also where the environment names a GPU, as Slurm's does.
test test-torch test-ray torture: export CUDA_VISIBLE_DEVICES =

test: lint ## everything that must hold
	$(BIN)/python -m pytest -n 3 --dist loadfile --max-worker-restart 0  # else it waits for ever when one has died

test-torch: .venv-torch/made ## the tests of the bindings for PyTorch and JAX, with Lightning, accelerate and transformers, all downloaded; TORCH='torch==…' and JAX=… choose a build, such as the small one for CPUs
	.venv-torch/bin/python -m pytest tests/bindings_torch tests/docs/test_pages.py tests/examples/test_minimal.py
	.venv-torch/bin/python -m pytest tests/bindings_jax  # apart: JAX has threads, and a test of PyTorch's forks

test-gpu: $(VENV)/made-test .venv-torch/made ## the tests of copies to a GPU, with the one that CUDA counts first
	CUDA_VISIBLE_DEVICES=0 $(BIN)/python -m pytest tests/bindings/test_gpu.py
	CUDA_VISIBLE_DEVICES=0 .venv-torch/bin/python -m pytest tests/bindings_torch/test_gpu.py tests/bindings_torch/test_unpack.py
	CUDA_VISIBLE_DEVICES=0 .venv-torch/bin/python -m pytest tests/bindings_jax -k gpu

test-ray: .venv-ray/made ## the tests of loaderd_ray: five minutes
	$(RAY)/python -m pytest tests/bindings_ray

torture: $(VENV)/made-test ## tests that take long: of the benchmark scripts, a thousand kills, 200 ended trainings, 200,000 damaged shards, 200,000 malformed messages, half a billion records: three hours
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest --hypothesis-profile=many $(shell grep -lr --include='test_*.py' 'import.* given\|stateful' tests)
	$(BIN)/python -m tests.reliability.torture
	$(BIN)/python -m tests.reliability.leaks
	$(BIN)/python -m tests.reliability.endings
	$(BIN)/python -m tests.reliability.mutations
	$(BIN)/python -m tests.reliability.fuzz_sockets
	$(BIN)/python -m tests.reliability.servers_killed
	$(BIN)/python -m tests.reliability.soak
	$(BIN)/python -m tests.reliability.soak --records 50e6 --consumer tf.data

newest: $(VENV)/made ## the tests of usage and endings on Python 3.13, the newest of TensorFlow's: yours, or Debian's (as root, with debootstrap)
	tests/newest.sh

compat: ## tests with the oldest versions that setup.cfg allows on OLDEST (python3.10), with the newest on NEWEST (python3.13)
	$(PYTHON) tests/compat.py oldest $(or $(OLDEST),python3.10)
	$(PYTHON) tests/compat.py newest $(or $(NEWEST),python3.13)

lint: $(VENV)/made-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy loaderd bindings/loaderd_tf bindings/loaderd_torch bindings/loaderd_jax bindings/loaderd_ray bench/harness

docs: .venv-docs/made ## the site, in docs/_build; a warning is an error
	.venv-docs/bin/sphinx-build -W --keep-going -q -b html docs docs/_build
	@echo docs/_build/index.html

package: .venv-package/made ## a wheel and an sdist in dist/, each installed and tried outside this folder
	tests/package.sh .venv-package/bin/python

bench: .venv-bench/made ## loaderd and its alternatives on the same records, in turn: about 25 minutes
	$(BENCH)/python bench/compare.py --results-dir bench/results $(ARGS)

clean: ## forget the environment and what the demo wrote
	rm -rf .venv .venv-* .newest demo docs/_build dist build

$(VENV)/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	$(BIN)/python $(PIP) '$(TENSORFLOW)' $(NVML)
	$(BIN)/python $(PIP) --editable .
	@touch $@

$(VENV)/made-demo: $(VENV)/made
	$(BIN)/python $(PIP) --editable '.[examples]'
	@touch $@

$(VENV)/made-test: $(VENV)/made
	$(BIN)/python $(PIP) --editable '.[examples,test]'
	$(BIN)/python $(PIP) --no-deps tf_keras  # it wants the package tensorflow, where this may be tensorflow-cpu
	@# setuptools' way to find the packages costs each process that starts 15 ms, and the tests start thousands
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		printf '%s\n' '$(CURDIR)' '$(CURDIR)/bindings' >"$$packages/loaderd.pth" && rm -f "$$packages"/__editable__*loaderd*
	@touch $@

# Without TensorFlow: the bindings need none.
.venv-torch/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	.venv-torch/bin/python $(PIP) '$(TORCH)' '$(JAX)' $(NVML)
	.venv-torch/bin/python $(PIP) --editable '.[torch,jax,test-torch]'
	@touch $@

# Without TensorFlow, PyTorch, JAX and Ray: Sphinx reads the bindings without them.
.venv-docs/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	.venv-docs/bin/python $(PIP) --editable '.[docs]'
	@touch $@

.venv-package/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	.venv-package/bin/python $(PIP) build
	@touch $@

# Apart from the other one: the alternatives are large.
.venv-bench/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	$(BENCH)/python $(PIP) '$(TENSORFLOW)' --editable '.[bench]'
	@touch $@

# Apart from the first one: Ray is large, and pins what others would have newer.
.venv-ray/made: $(SETUP)
	$(NEW_ENVIRONMENT)
	$(RAY)/python $(PIP) '$(TENSORFLOW)' pytest pytest-timeout hypothesis
	$(RAY)/python $(PIP) --editable '.[examples,ray]'
	$(RAY)/python $(PIP) --no-deps tf_keras  # it wants the package tensorflow, where this may be tensorflow-cpu
	@touch $@
