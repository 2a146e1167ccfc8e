#!/usr/bin/env bash
# The long proofs, one after the other; each line says how it ended. Usage: soak.sh BIN [OUT]
# They take hours; PARTS="campaign soak" runs some of them.
set -u
bin=$1 out=${2:-soak-results}
cd "$(dirname "$0")/.."
mkdir -p "$out"
status=0
part() {
  local name=$1; shift
  case " ${PARTS:-campaign soak no_false_kill fuzz more} " in *" $name "*) ;; *) return ;; esac
  local began=$SECONDS
  "$@" >"$out/$name.log" 2>&1
  local rc=$?
  echo "$name: $([ $rc = 0 ] && echo held || echo "FAILED (exit $rc), see $out/$name.log") after $((SECONDS - began)) s"
  [ $rc = 0 ] || { status=1; tail -n 5 "$out/$name.log"; }
}
part campaign "$bin/python" -m tests.support.fault_injection --rounds 500 --out "$out/campaign.json"
part soak "$bin/python" -m tests.support.soak --kills 100 --seed 1 -o "$out/soak.json"
part no_false_kill "$bin/python" benchmarks/no_false_kill.py -o "$out/no_false_kill.json"
part fuzz env UNBROKEN_FUZZ_TIMES=10 "$bin/pytest" -q -m fuzz -p no:cacheprovider --timeout 1200
part more "$bin/pytest" -q -m soak -n 2 --dist loadfile
exit $status
