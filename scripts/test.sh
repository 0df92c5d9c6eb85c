#!/usr/bin/env bash
# Sets up what the tests need and runs them. With CI set, nothing may be missing.
set -euo pipefail

usage='Usage: scripts/test.sh [--slow] [arguments of pytest]

Runs the tests that are not marked slow; --slow adds those. Paths are relative to the repository:
  scripts/test.sh tests/rules_test.py -k cactus
The first run builds .venv. PYTHON=... chooses the interpreter.'
slow=no

for argument; do  # takes --slow out and keeps the rest in place
  shift
  case $argument in
    -h | --help) printf '%s\n' "$usage"; exit ;;
    --slow) slow=yes ;;
    *) set -- "$@" "$argument" ;;
  esac
done
[ $# -gt 0 ] || set -- -n auto --maxprocesses 4  # the whole suite: on several cores
[ $slow = yes ] || set -- -m 'not slow' "$@"

source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
set_up_package
set_up_tests
set_up_model
torch=yes
set_up_torch || torch=no
without_torch="WITHOUT torch: the comparisons with transformers' own models are SKIPPED."
if [ $torch = no ]; then
  [ -z "${CI:-}" ] || die 'torch is missing, and CI is set: the comparisons may not be skipped.'
  say "$without_torch"
fi

cd -- "$ROOT"
status=0
"$VENV/bin/python" -m pytest -rfEs "$@" || status=$?

[ $slow = yes ] || say 'Tests marked slow were left out; scripts/test.sh --slow runs them too.'
[ $torch = yes ] || say "$without_torch"
exit $status
