#!/usr/bin/env bash
# Unpacks Megatron's trainer into VENV/megatron, for tests/hooks: its releases from 0.17 on say that they want Python 3.12,
# and run on 3.11 too (tests/hooks/on_cpu/pretrain.py). Usage: megatron.sh VENV
set -eu
venv=$1 version=0.19.2
[ -d "$venv/megatron/megatron_core-$version.dist-info" ] && exit 0
rm -rf "$venv/megatron"
"$venv/bin/python" -m pip install -q --no-deps --no-compile --target "$venv/megatron" --python-version 3.12 --implementation cp \
  --only-binary=:all: --platform manylinux_2_28_x86_64 "megatron-core==$version" ||
  echo "(Megatron's trainer could not be had; its test skips with the reason)"
