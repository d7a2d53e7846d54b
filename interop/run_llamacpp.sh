#!/bin/sh
# Acceptance of an EAGLE-3 head in llama.cpp on the CPU against our own chains. One command:
#   interop/run_llamacpp.sh HEAD [options of llamacpp_acceptance.py]
# Builds llama.cpp on the first run (needs cmake and a C++ compiler; some minutes). The sources: see llamacpp_source.sh.
#   LLAMACPP_BUILD   a build of them to use instead
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/llamacpp_acceptance.py" --check --llamacpp none --build none "$@"
. "$here/llamacpp_source.sh"
build=${LLAMACPP_BUILD:-$home/build}
if [ ! -x "$build/bin/llama-speculative-simple" ] || [ ! -x "$build/bin/llama-simple" ]; then
    cmake -S "$source" -B "$build" -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build "$build" -j "$(nproc)" --target llama-speculative-simple llama-simple
fi
exec "$python" "$here/llamacpp_acceptance.py" --llamacpp "$source" --build "$build" --version "$version" "$@"
