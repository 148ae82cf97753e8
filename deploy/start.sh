#!/bin/sh
# What a container of an image runs: the arguments, where there are any, else the service that the image is of.
#
# A container is started again by an engine that knows nothing of exit codes. 75 means that another process has taken
# over the tasks, and a start at once would take them back; so the container ends FENCED_PAUSE_SECONDS (30) later.
set -u
[ $# -gt 0 ] && exec "$@"

stopping= child=
stop() {
  stopping=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap stop TERM INT

python -m "rollmill_$(echo "$SERVICE" | tr - _)" &
child=$!
[ -z "$stopping" ] || stop # it came before there was a process to tell
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the waiting, and not the service, which drains
  wait "$child"
  code=$?
done

if [ "$code" -eq 75 ] && [ -z "$stopping" ]; then
  sleep "${FENCED_PAUSE_SECONDS:-30}" &
  child=$!
  wait "$child"
fi
exit "$code"
