#!/usr/bin/env bash
# Runs the checks and the tests. Usage: test.sh BIN fast|all
set -u
bin=$1 which=$2
cd "$(dirname "$0")/.."
# Test ids may show sets: the parallel runners must see the same order.
export PYTHONHASHSEED=0
# Runners share the cores, and each starts ranks of its own: threads of each beside them only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
# Where PYTHONDONTWRITEBYTECODE is set, as in many images, each of the thousands of processes would compile what it imports: half of a start.
"$bin/python" -m compileall -q -j 0 src tests benchmarks examples >/dev/null 2>&1 || true
status=0
"$bin/ruff" check . || status=1
"$bin/ruff" format --check . || status=1
"$bin/mypy" || status=1
if [ "$which" = fast ]; then
  "$bin/pytest" -q -m "not slow" -n 2 --dist loadfile || status=1
else
  bash scripts/services.sh || echo "(some services could not be installed; their tests skip with the reason)"
  "$bin/pytest" -q -m "not slow" -n 2 --dist loadfile || status=1
  # The breaker's list and the long proofs have commands of their own, `make breakers` and `make soak`.
  # Three runners on two cores: half of the time these wait, for a lease, a time-out, the start of a process. The whole took 31 minutes so
  # beside other work (load 2 to 25), where two runners had done seven tenths of it in 45.
  # Files in the order of tests/conftest.py, the longest first: else those with few tests come last, and they are the longest.
  "$bin/pytest" -q -m "slow and not breakers and not soak" -n 3 --dist loadfile --no-loadscope-reorder --durations 40 || status=1
fi
exit $status
