# Sourced by launch_tpu_pod.sh and launch_xpk.sh: how they refuse, quote, and execute or only print, as $dry_run says.

source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

bad() { say "error: $*"; say "scripts/${0##*/} --help tells the steps and their options."; exit 2; }

# quoted WORD...: the words as a shell reads them, in one line.
quoted() {
  local word separator=
  for word; do
    case $word in
      '' | *[!A-Za-z0-9_./:=@%+,-]*) word=$(printf '%s\n' "$word" | LC_ALL=C sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/") ;;
    esac
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
  printf '\n'
}

# execute COMMAND...: runs it, or only prints it.
execute() {
  if [ $dry_run = yes ]; then
    quoted "$@"
  else
    say "+ $(quoted "$@")"
    "$@"
  fi
}
