#!/bin/sh
# Acceptance of an EAGLE-3 head in OpenVINO GenAI on the CPU against our own chains. One command:
#   interop/run_openvino.sh HEAD [options of openvino_acceptance.py]
#   OPENVINO_VENV   an environment to use (as it is, if it exists); default interop/.venv-openvino, which
#   is made on the first run (needs a PyPI index)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/openvino_acceptance.py" --check --python none "$@"
venv=${OPENVINO_VENV:-$here/.venv-openvino}
if [ ! -e "$venv/.ready" ] && { [ -z "${OPENVINO_VENV:-}" ] || [ ! -x "$venv/bin/optimum-cli" ]; }; then
    python3 -m venv "$venv"
    # A plain install of optimum-intel wants torchvision and with it another torch.
    "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet 'optimum~=2.3.0' 'transformers<5.6,>=4.51' 'huggingface-hub<1.22,>=0.23.2' \
        'nncf>=3.3.0' openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 openvino-genai==2026.4.1.0 torch==2.13.0
    "$venv/bin/pip" install --quiet --no-deps optimum-intel==2.2.0
    "$venv/bin/pip" install --quiet 'requests<3,>=2.33' 'huggingface-hub<1.22' 'diffusers<0.42' einops
    touch "$venv/.ready"
fi
export HF_HUB_OFFLINE=1 AQUILINE_OPTIMUM_CLI="$venv/bin/optimum-cli"
exec "$python" "$here/openvino_acceptance.py" --python "$venv/bin/python" "$@"
