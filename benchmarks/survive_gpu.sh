#!/usr/bin/env bash
# The demo's story on 1, 2 and 4 GPUs of one machine, from a source checkout on a plain PyTorch image.
#   one GPU:   two nodes x two ranks share the card over gloo
#   two GPUs:  NCCL, one rank per node; the spare inherits the dead node's GPU
#   four GPUs: NCCL, two nodes x two ranks
# Usage: benchmarks/survive_gpu.sh OUT_FOLDER [SEED]; writes survive-{1,2,4}gpu.json there; skips what the machine lacks.
set -u
out=${1:?where to write the results} seed=${2:-1}
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -1
"$python" -c 'import torch; print("torch", torch.__version__)'
echo "commit $commit"
status=0
story() { # number of GPUs, visible devices, ranks per node, more training options
  if [ "$gpus" -lt "$1" ]; then echo "== $1 GPUs: this machine has $gpus"; return; fi
  echo "== $1 GPUs"
  CUDA_VISIBLE_DEVICES=$2 "$python" -m unbroken demo --dir "$out/tmp-$1" --seed "$seed" --steps 160 --nodes 2 --nproc "$3" \
    --train "--device cuda $4" --limit 170s --json >"$out/survive-$1gpu.json" 2>"$out/survive-$1gpu.log" || status=1
  tail -n 22 "$out/survive-$1gpu.log"
  rm -rf "$out/tmp-$1"
}
story 1 0 2 "--backend gloo"
story 2 0,1 1 "--backend nccl"
story 4 0,1,2,3 2 "--backend nccl"
exit $status
