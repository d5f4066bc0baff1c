#!/usr/bin/env bash
# Tries what is about to be released: installs the pre-releases of JAX and its libraries beside this
# project into an environment of its own, says what they are, and runs the quick tests. For people,
# once a week or so; CI takes what is released. Arguments go to pytest:
#
#     scripts/newest.sh                      # the quick tests
#     scripts/newest.sh tests/programs/test_equation_layouts.py tests/policy/test_jax_versions.py
#
# PYTHON names the interpreter (the newest that tpudist supports, by default python3.13).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.13}
if ! "$python" -c "import ensurepip" 2>/dev/null; then
  echo "$0: $python does not run. Name an interpreter: PYTHON=/path/to/python3.13 $0" >&2
  exit 1
fi
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --pre --upgrade \
  "jax[tpu]" flax optax orbax-checkpoint grain -e ".[test]"
"$environment/bin/python" -m pip list 2>/dev/null |
  grep -E "^(jax|jaxlib|libtpu|flax|optax|orbax-checkpoint|grain|numpy) "
if [ $# = 0 ]; then set -- -m "not slow"; fi
"$environment/bin/python" -m pytest "$@"
