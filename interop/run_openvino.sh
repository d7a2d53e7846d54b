#!/bin/sh
# Acceptance of an EAGLE-3 head in OpenVINO GenAI on the CPU against our own chains. One command:
#   interop/run_openvino.sh HEAD [options of openvino_acceptance.py]
# The environment: see openvino_env.sh.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/openvino_acceptance.py" --check --python none "$@"
. "$here/openvino_env.sh"
exec "$python" "$here/openvino_acceptance.py" --python "$venv/bin/python" "$@"
