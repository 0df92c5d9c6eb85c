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
# The whole suite: on several cores, each file on one, which then makes what its tests share once.
[ $# -gt 0 ] || set -- -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
[ $slow = yes ] || set -- -m 'not slow' "$@"

source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
set_up_package
set_up_tests
set_up_model
skipped=''

# optional NAME WHAT: sets NAME up; without it the tests of WHAT are skipped, which is said, and said again at the end.
optional() {
  if "set_up_$1"; then return; fi
  [ -z "${CI:-}" ] || die "$1 is missing, and CI is set: $2 may not be skipped."
  say "WITHOUT $1: $2 are SKIPPED."
  skipped=$skipped${skipped:+$'\n'}"WITHOUT $1: $2 are SKIPPED."
}

optional torch "the comparisons with transformers' own models"
if [ "$(uname)" = Darwin ]; then
  say 'There is no libtpu for macOS: the programs compiled for TPUs are not tested.'
else
  optional libtpu 'the programs compiled for TPUs'
fi
[ ! -f "$LIBTPU" ] || export CACTUS_LIBTPU="$LIBTPU"

cd -- "$ROOT"
status=0
"$VENV/bin/python" -m pytest -rfEs "$@" || status=$?

[ $slow = yes ] || say 'Tests marked slow were left out; scripts/test.sh --slow runs them too.'
[ -z "$skipped" ] || say "$skipped"
exit $status
