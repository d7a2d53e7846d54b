#!/bin/sh
# speculators' own loader opens our export, and its converter and ours write the same head. One command:
#   interop/run_speculators.sh HEAD [options of speculators_loader.py]
#   SPECULATORS_VENV   an environment to use (as it is, if it exists); default interop/.venv-speculators, which
#   is made on the first run (needs a PyPI index)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/speculators_loader.py" --check --python none "$@"
venv=${SPECULATORS_VENV:-$here/.venv-speculators}
if [ ! -e "$venv/.ready" ] && { [ -z "${SPECULATORS_VENV:-}" ] || [ ! -x "$venv/bin/speculators" ]; }; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet aiohttp click 'datasets<=5.1.0,>=4.0.0' httpx huggingface-hub \
        'loguru<=0.7.3,>=0.7.2' 'numpy<=2.5.4' 'openai>=2' protobuf psutil 'pydantic>=2' 'pydantic-settings>=2' \
        rich safetensors 'tqdm<=4.70.1' 'transformers<=5.19.0,>=5.0.0' 'typer>=0.12' requests
    "$venv/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
    "$venv/bin/pip" install --quiet nvidia-modelopt==0.47.0
    touch "$venv/.ready"
fi
export HF_HUB_OFFLINE=1
exec "$python" "$here/speculators_loader.py" --python "$venv/bin/python" "$@"
