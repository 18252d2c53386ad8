# Targets that need a GPU. Included by the Makefile.
#
#   GPU_PYTHON      a Python with torch 2.11 or newer for that GPU
#   GPU_PACK        folder with the packages that the machine lacks, filled by `make gpu-pack`
#   GPU_ARGS        further options, see cuda/gpu/gpu_run.py

GPU_PYTHON ?= python3
GPU_PACK ?= build/gpu-pack
GPU_PACK_PYTHON ?= 3.12
GPU_ARGS ?=

.PHONY: gpu
gpu:  ## on a machine with a GPU: checks, compute-sanitizer, figures; no network needed
	@"$(GPU_PYTHON)" cuda/gpu/gpu_run.py --pack "$(GPU_PACK)" $(GPU_ARGS)

.PHONY: gpu-pack
gpu-pack: venv  ## collect what `make gpu` needs on a machine without network
	@PATH="$(BIN):$$PATH" $(BIN)/python cuda/gpu/gpu_pack.py "$(GPU_PACK)" --python "$(GPU_PACK_PYTHON)"
