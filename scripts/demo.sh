#!/usr/bin/env bash
# Answers a prompt by speculative decoding with the Cactus rule. The first run sets everything up.
set -euo pipefail

usage='Usage: scripts/demo.sh ["a prompt"] [flags]

Answers the prompt with a small model on this machine. The flags go to experiments/generate.py
and may replace the ones set here, for example:
  scripts/demo.sh "Why is the sky blue?" --rule=exact
  scripts/demo.sh --delta=0.25
The first run builds .venv and downloads the model. PYTHON=... chooses the interpreter.'
prompt='Summarise this text in three bullet points: The honeybee colony lives in a hive. The queen lays up to two
thousand eggs a day. The workers gather nectar, build the comb and guard the entrance. In autumn the drones are driven
out, and the colony survives the winter on its store of honey.'

draft=lookup # an answer to this prompt repeats it, and is copied from it

case ${1--} in
  -h | --help) printf '%s\n' "$usage"; exit ;;
  -*) ;;
  *) prompt=$1; draft=; shift; set -- --num_draft=3 "$@" ;; # of the distilled draft's numbers the best with Cactus
esac

source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"
set_up_package
set_up_model

case " $*" in
  *' --rule'* | *' -rule'*) ;;  # the user's rule comes with its own numbers
  *) set -- --rule=cactus --delta=1 "$@" ;;
esac

case " $*" in
  *' --draft'* | *' -draft'*) ;;
  *) [ -z "$draft" ] || set -- --draft="$draft" "$@" ;;
esac

say "Prompt: $prompt"
[ -n "$(ls -A "$JAX_COMPILATION_CACHE_DIR" 2> /dev/null)" ] || say 'The first run compiles, for up to a minute.'
exec "$VENV/bin/python" "$ROOT/experiments/generate.py" --prompt="$prompt" "$@"
