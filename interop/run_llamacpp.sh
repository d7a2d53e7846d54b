#!/bin/sh
# Acceptance of an EAGLE-3 head in llama.cpp on the CPU against our own chains. One command:
#   interop/run_llamacpp.sh HEAD [options of llamacpp_acceptance.py]
# Builds llama.cpp from the sources inside the sdist of llama-cpp-python on the first run (needs a PyPI
# index, cmake and a C++ compiler; some minutes), under interop/.llamacpp or LLAMACPP_HOME.
#   LLAMACPP_SOURCE, LLAMACPP_BUILD   sources and a build of them to use instead
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
"$python" "$here/llamacpp_acceptance.py" --check --llamacpp none --build none "$@"
version=0.3.36
home=${LLAMACPP_HOME:-$here/.llamacpp}
source=${LLAMACPP_SOURCE:-$home/llama_cpp_python-$version/vendor/llama.cpp}
build=${LLAMACPP_BUILD:-$home/build}
if [ ! -d "$source" ]; then
    mkdir -p "$home"
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$home" "llama-cpp-python==$version"
    tar xzf "$home/llama_cpp_python-$version.tar.gz" -C "$home"
fi
if [ ! -x "$build/bin/llama-speculative-simple" ] || [ ! -x "$build/bin/llama-simple" ]; then
    cmake -S "$source" -B "$build" -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF \
        -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF
    cmake --build "$build" -j "$(nproc)" --target llama-speculative-simple llama-simple
fi
# llama.cpp's converter of targets imports it before it knows whether it will need it.
if [ ! -d "$home/packages/sentencepiece" ]; then
    "$python" -m pip install --quiet --no-deps --target "$home/packages" sentencepiece
fi
export LLAMACPP_PACKAGES="$home/packages"
exec "$python" "$here/llamacpp_acceptance.py" --llamacpp "$source" --build "$build" --version "$version" "$@"
