#!/usr/bin/env bash
# Installs into a virtual environment from pinned versions. Usage: install.sh VENV run|test|all
# A second call with the same pins does nothing (the Makefile's stamps see to that).
set -eu
venv=$1 what=$2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "unbroken needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1 || echo missing)." \
       "Name another one: make PYTHON=/path/to/python3.12 $what" >&2
  exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
  echo "could not make a virtual environment in $venv (on Debian: apt-get install python3-venv)" >&2; exit 1; }
[ -f "$venv/.pip-updated" ] || { "$venv/bin/python" -m pip install -q 'pip==25.3' && touch "$venv/.pip-updated"; }
echo "installing the pinned requirements of requirements/$what.txt into $venv ..."
"$venv/bin/python" -m pip install -q --no-compile -r "requirements/$what.txt"
# pip compiles on one core, nearly a minute for torch; this takes all of them. Some packages hold files for other
# versions of Python, which do not compile: no failure.
"$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3.*/site-packages >/dev/null 2>&1 || true
# --no-deps: every dependency is pinned above. No build isolation, so that nothing unpinned is fetched.
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation -e .
