#!/bin/sh
# `aquiline serve --engine vllm` with real vLLM, and `aquiline prepare --regenerate` against it. One command:
#   interop/run_serve.sh [options of serve_regeneration.py]
# The environment: see vllm_env.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/serve_regeneration.py" --check "$@"
. "$here/vllm_env.sh"
export AQUILINE_VLLM="$venv/bin/vllm"
exec "$python" "$here/serve_regeneration.py" "$@"
