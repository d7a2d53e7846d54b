#!/bin/sh
# Speed of greedy decoding in several engines on this machine, every prompt on each engine in turn. One command:
#   interop/run_speed.sh HEAD [options of speed.py]
# The environments are made on the first run (minutes; 5 GB): see llamacpp_env.sh, openvino_env.sh and vllm_env.sh. An
# engine that is missing or fails is left out; --engines names some of them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
exec "$python" "$here/speed.py" "$@"
