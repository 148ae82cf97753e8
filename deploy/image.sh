#!/bin/sh
# How packages get into an image. The Dockerfile runs these steps in containers, tests/e2e/test_wheel.py in folders.
#
#   image.sh wheel SOURCE DIST           builds the one wheel into DIST
#   image.sh install DIST VENV EXTRAS    makes VENV with that wheel and its extras, "builder,blobs"; "" is none
#
# PYTHON is the interpreter, with pip.
set -eu
python=${PYTHON:-python}
step=$1
shift

wheel() { # SOURCE DIST
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$2" "$1"
}

install() { # DIST VENV EXTRAS
  target=$(echo "$1"/rollmill-*.whl)
  [ -z "$3" ] || target="$target[$3]"
  "$python" -m venv --without-pip "$2"
  "$python" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check "$target"
}

case $step in
wheel) wheel "$@" ;;
install) install "$@" ;;
*) echo "unknown step $step: wheel or install" >&2 && exit 64 ;;
esac
