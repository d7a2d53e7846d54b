# Sourced by run_openvino.sh and speed.py: finds or makes the environment with OpenVINO GenAI and optimum-intel.
#   OPENVINO_VENV   an environment to use (as it is, if it exists); default interop/.venv-openvino, which
#                   is made on the first run (needs a PyPI index)
# Sets venv and python (ours), and exports the converter's name.
venv=${OPENVINO_VENV:-$here/.venv-openvino}
python=${PYTHON:-$here/../.venv/bin/python}
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
