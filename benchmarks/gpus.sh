#!/usr/bin/env bash
# What is claimed of GPUs, part by part; each part stands alone, and those with minutes behind them took so long on H100 or H200.
#
#   benchmarks/gpus.sh tests OUT        one GPU: snapshots of GPU state, evaluation on a GPU
#   benchmarks/gpus.sh scores OUT       one GPU: `unbroken eval` against lm_eval alone; needs lm-eval
#   benchmarks/gpus.sh checkpoint OUT   one GPU: ours, DCP overlapped in a process, restores            (6 minutes)
#   benchmarks/gpus.sh peers OUT        one GPU: the other ways of DCP, torch_checkpointing, NVRx, DLRover, torch.save;
#                                       run it again with the same OUT where a time limit cut it: what is done is kept
#   benchmarks/gpus.sh fsdp2 OUT        all GPUs: 7 B parameters under FSDP2                             (6 minutes on two)
#   benchmarks/gpus.sh limits OUT       all GPUs: what bare copies of the 7 B state cost the steps beside them (not run yet)
#   benchmarks/gpus.sh evaluation OUT   all GPUs: `unbroken eval` and one job per dataset              (8 minutes on two;
#                                       ARMS=ours for ours alone, 4 minutes)
#   benchmarks/gpus.sh generation OUT   one GPU: texts, likelihoods, five shots against batches of eight (3 minutes;
#                                       PARTS=texts for one of them)
#   benchmarks/gpus.sh engines OUT      one GPU: six tasks, ours against lm_eval's own `hf` with automatic batch size; needs
#                                       lm-eval (MODEL=6b or 1b, DOCUMENTS=300; 4 minutes)
#   benchmarks/gpus.sh start OUT        all GPUs: a worker's start without bytecode, with ours, and forked          (1 minute)
#   benchmarks/gpus.sh torn OUT         one GPU: the torn state of DCP's stager, and ours                (1 minute)
#
# Lines come as they are printed, so that a run that is cut off shows how far it came. OUT is a folder.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?which part: tests, scores, checkpoint, peers, fsdp2, limits, evaluation, generation, engines, start, torn}
out=${2:?a folder for the results}
mkdir -p "$out"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
memory=$("$python" -c "from unbroken.machine import usable_memory; print(f'{usable_memory() * 74 // 100 >> 20}MiB')")
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

case $part in
tests) "$python" -m pytest tests/gpu -q -p no:cacheprovider --ignore tests/gpu/test_same_scores_cuda.py --durations 5 ;;
scores) "$python" -m pytest tests/gpu/test_same_scores_cuda.py -v -p no:cacheprovider --durations 0 ;;
checkpoint)
	"$python" benchmarks/checkpoint.py --model 1b --arms dcp_process --ours 11 --window 6 --out "$out/checkpoint.json"
	;;
peers)
	"$python" benchmarks/checkpoint.py --model 1b --arms dcp_thread,torch_checkpointing,nvrx,dlrover,dcp_async,dcp,torch_save \
		--ours 2 --ours-per-block 0 --saves 5 --window 4 --no-restore --out "$out/peers.json"
	;;
fsdp2)
	"$python" -m torch.distributed.run --nproc-per-node "$gpus" benchmarks/checkpoint.py --model 7b --arms "" --ours 21 \
		--window 3 --persist-every 21 --keep 1 --buffers 2 --memory "$memory" --out "$out/fsdp2.json"
	;;
limits)
	"$python" -m torch.distributed.run --nproc-per-node "$gpus" benchmarks/copy_limits.py --model 7b --repeat 3 --out "$out/limits.json"
	;;
evaluation)
	"$python" benchmarks/evaluation.py --real --seconds 150 --arms "${ARMS:-ours,baseline}" --out "$out"
	;;
generation)
	"$python" benchmarks/generation.py --gpu --parts "${PARTS:-}" --out "$out/generation-${PARTS:+$PARTS-}gpu.json"
	;;
engines)
	"$python" benchmarks/engines.py --engine hf --make "${MODEL:-6b}" --device cuda:0 --dtype bfloat16 --suite six \
		--documents "${DOCUMENTS:-300}" --keep "$out/engines-ours" --out "$out/engines-hf-gpu.json"
	;;
start) "$python" benchmarks/evaluation_start.py --out "$out/start.json" ;;
torn) "$python" benchmarks/torn_snapshot.py --out "$out/torn.json" ;;
*)
	echo "there is no part '$part'" >&2
	exit 2
	;;
esac
