#!/bin/sh
# Clients, unmodified, against `aquiline serve` with the default target. One command:
#   interop/run_clients.sh [--record]
# CLIENTS_VENV and CLIENTS_NODE: a Python environment with langchain-openai, lm-eval[api] and schemathesis, and a
# folder with node_modules of openai, ai and @ai-sdk/openai-compatible. Both are made on the first run otherwise.
# SCHEMATHESIS_EXAMPLES: bodies for each endpoint (default: 10000).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv/bin/python}
work=$here/.work
mkdir -p "$work"
venv=${CLIENTS_VENV:-$work/clients-venv}
node=${CLIENTS_NODE:-$work/clients-node}
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet langchain-openai "lm-eval[api]" schemathesis
fi
if [ ! -d "$node/node_modules" ]; then
  mkdir -p "$node"
  (cd "$node" && npm install --silent --no-audit --no-fund openai ai @ai-sdk/openai-compatible)
fi
log=$work/clients-server.txt
"$python" -m aquiline.cli serve --port 0 --dtype float32 --served-model-name smollm2 >"$log" 2>"$log.errors" &
server=$!
trap 'kill "$server"' EXIT
until grep -q '^ready: ' "$log"; do
  kill -0 "$server" || { cat "$log.errors"; exit 1; }
  sleep 1
done
url=$(sed -n 's/^ready: \([^ ]*\) .*/\1/p' "$log")
target=$("$python" -c 'from aquiline.models.resolve import resolve_target; print(resolve_target("smollm2"))')
lines=$work/clients.jsonl
(cd "$node" && node "$here/clients/openai_client.mjs" "$url" smollm2) | tail -n 1 >"$lines"
(cd "$node" && node "$here/clients/ai_sdk.mjs" "$url" smollm2) | tail -n 1 >>"$lines"
"$venv/bin/python" "$here/clients/langchain_client.py" "$url" smollm2 | tail -n 1 >>"$lines"
# In process, lm-eval's score is computed by this project's environment.
"$venv/bin/python" "$here/clients/lm_eval_client.py" "$url" smollm2 "$target" "$python" | tail -n 1 >>"$lines"
examples=${SCHEMATHESIS_EXAMPLES:-10000}
"$venv/bin/schemathesis" run "$here/clients/openapi.json" --url "$url" --checks not_a_server_error \
  --phases fuzzing --request-timeout 120 --max-examples "$examples" --no-color
version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("schemathesis"))')
echo "{\"client\": \"schemathesis\", \"version\": \"$version\", \"examples\": $examples, \"passed\": true}" >>"$lines"
cat "$lines"
if [ "${1:-}" = --record ]; then
  "$python" -c 'import json, sys; print(json.dumps([json.loads(line) for line in sys.stdin], indent=1))' \
    <"$lines" >"$here/results/clients.json"
fi
