# Sourced by run_llamacpp.sh and llamacpp_env.sh: finds or fetches llama.cpp's sources, which are inside the sdist of
# llama-cpp-python (needs a PyPI index), under interop/.llamacpp or LLAMACPP_HOME.
#   LLAMACPP_SOURCE   sources to use instead
# Sets version, home, source and python (ours), and exports what llama.cpp's converter of targets lacks in ours.
python=${PYTHON:-$here/../.venv/bin/python}
version=0.3.36
home=${LLAMACPP_HOME:-$here/.llamacpp}
source=${LLAMACPP_SOURCE:-$home/llama_cpp_python-$version/vendor/llama.cpp}
if [ ! -d "$source" ]; then
    mkdir -p "$home"
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python -d "$home" "llama-cpp-python==$version"
    tar xzf "$home/llama_cpp_python-$version.tar.gz" -C "$home"
fi
# The converter imports it before it knows whether it will need it.
if [ ! -d "$home/packages/sentencepiece" ]; then
    "$python" -m pip install --quiet --no-deps --target "$home/packages" sentencepiece
fi
export LLAMACPP_PACKAGES="$home/packages"
