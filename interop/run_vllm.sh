#!/bin/sh
# Acceptance of a head in real vLLM on the CPU against our own chains. One command:
#   interop/run_vllm.sh HEAD [options of vllm_acceptance.py]
# The environment: see vllm_env.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/vllm_acceptance.py" --check --python none "$@"
. "$here/vllm_env.sh"
exec "$python" "$here/vllm_acceptance.py" --python "$venv/bin/python" "$@"
