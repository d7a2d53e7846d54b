# Sourced by speed.py: finds or makes the environment with llama-cpp-python, and matplotlib for the plot.
#   LLAMACPP_VENV   an environment to use (as it is, if it exists); default interop/.venv-llamacpp, which is
#                   made on the first run (some minutes; needs a PyPI index, cmake and a C++ compiler)
# Sets venv, and what llamacpp_source.sh sets.
. "$here/llamacpp_source.sh"
venv=${LLAMACPP_VENV:-$here/.venv-llamacpp}
if [ ! -e "$venv/.ready" ] && { [ -z "${LLAMACPP_VENV:-}" ] || [ ! -x "$venv/bin/python" ]; }; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet matplotlib
    CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) CMAKE_ARGS=-DGGML_NATIVE=ON \
        "$venv/bin/pip" install --quiet --no-binary llama-cpp-python "llama-cpp-python==$version"
    touch "$venv/.ready"
fi
