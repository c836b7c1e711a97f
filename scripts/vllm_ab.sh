#!/usr/bin/env bash
# A/B of vLLM's indexer on a machine that serves a real model: A is vLLM as it is, B the same with
# LIGHTNING_INDEXER_VLLM=$SEAMS. Serves, measures throughput and TTFT, records one kernel trace a side, and compares them.
#
#   scripts/vllm_ab.sh MODEL [OUT]
#   TP=4 ISL=60000 OSL=600 CONCURRENCY="4 8 16 32" scripts/vllm_ab.sh zai-org/GLM-5.2-FP8 results/ab
#
# Variables, with their defaults: TP=1, PORT=8100, ISL=60000, OSL=600, CONCURRENCY="4 8", PROMPTS_PER=4 (prompts for each
# concurrent request), ROUNDS=2 (A B A B), TRACE=1, SEAMS=1 (or names, such as prefill,decode), SERVE_ARGS (more arguments
# of `vllm serve`), READY_S=1800. Needs vLLM 0.33 and lightning-indexer in one environment; docs/engines.md says the rest.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,10p' "$0" | sed 's/^# \{0,1\}//'
  exit 2
fi
MODEL=$1
OUT=$(realpath -m "${2:-results/vllm_ab}")
TP=${TP:-1} PORT=${PORT:-8100} ISL=${ISL:-60000} OSL=${OSL:-600} CONCURRENCY=${CONCURRENCY:-4 8}
PROMPTS_PER=${PROMPTS_PER:-4} ROUNDS=${ROUNDS:-2} TRACE=${TRACE:-1} SEAMS=${SEAMS:-1} READY_S=${READY_S:-1800}
read -r -a MORE <<<"${SERVE_ARGS:-}"
export VLLM_ROCM_USE_AITER=${VLLM_ROCM_USE_AITER:-1}

for tool in vllm lightning-indexer curl; do
  command -v "$tool" >/dev/null || { echo "vllm_ab: $tool is not on the PATH" >&2; exit 1; }
done
python -c 'import importlib.metadata as m, sys
sys.exit(not any(e.name == "lightning_indexer" for e in m.entry_points(group="vllm.general_plugins")))' ||
  { echo "vllm_ab: lightning-indexer is not installed as a plugin of this vLLM: pip install it here" >&2; exit 1; }

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; }
if answers; then
  echo "vllm_ab: something serves on port $PORT already, and would be measured instead: stop it, or set PORT" >&2
  exit 1
fi

mkdir -p "$OUT"
SERVER=
stop() {
  [[ -n $SERVER ]] || return 0
  kill "$SERVER" 2>/dev/null || true
  wait "$SERVER" 2>/dev/null || true
  SERVER=
}
trap stop EXIT

alive() { # side
  kill -0 "$SERVER" 2>/dev/null || { echo "vllm_ab: the server of $1 ended; see $OUT/serve-$1.log" >&2; exit 1; }
}

serve() { # side, 0 or the seams
  local log=$OUT/serve-$1.log waited=0
  # The last server's processes may hold the port for a while.
  while answers; do
    ((waited += 5)) && ((waited < 120)) || { echo "vllm_ab: port $PORT stays taken before $1 starts" >&2; exit 1; }
    sleep 5
  done
  waited=0
  local traces=$OUT/traces-$1
  mkdir -p "$traces"
  echo "== $1: LIGHTNING_INDEXER_VLLM=$2, log $log"
  # Prefix caching would answer the second round from memory.
  LIGHTNING_INDEXER_VLLM=$2 vllm serve "$MODEL" --port "$PORT" --tensor-parallel-size "$TP" \
    --no-enable-prefix-caching \
    --profiler-config "{\"profiler\": \"torch\", \"torch_profiler_dir\": \"$traces\", \"torch_profiler_with_stack\": false}" \
    "${MORE[@]}" >"$log" 2>&1 &
  SERVER=$!
  until curl -fs "http://127.0.0.1:$PORT/health" >/dev/null; do
    alive "$1"
    ((waited += 5)) && ((waited < READY_S)) || { echo "vllm_ab: no server of $1 after $READY_S s; see $log" >&2; exit 1; }
    sleep 5
  done
  alive "$1"
  if [[ $2 != 0 ]] && ! grep -q "lightning-indexer replaced" "$log"; then
    echo "vllm_ab: B serves, and its log does not say that lightning-indexer replaced anything; see $log" >&2
    exit 1
  fi
}

taken() { # after the first load: the line comes with the first call
  local log=$OUT/serve-B.log
  grep -q "lightning-indexer took its first call" "$log" && return
  echo "vllm_ab: B has answered requests, and its log does not say that lightning-indexer took a call; see $log" >&2
  grep "lightning-indexer passed a call on" "$log" | head -n 3 >&2 || true
  exit 1
}

load() { # side, name, concurrency, further arguments
  local side=$1 name=$2 concurrency=$3
  shift 3
  vllm bench serve --model "$MODEL" --port "$PORT" --dataset-name random --random-input-len "$ISL" \
    --random-output-len "$OSL" --ignore-eos --seed 0 --max-concurrency "$concurrency" \
    --num-prompts $((concurrency * PROMPTS_PER)) --save-result --result-dir "$OUT" \
    --result-filename "$side-$name.json" "$@" || { alive "$side"; exit 1; }
  alive "$side"
}

for round in $(seq "$ROUNDS"); do
  for side in A B; do
    serve "$side" "$([[ $side == B ]] && echo "$SEAMS" || echo 0)"
    load "$side" warm 1 >/dev/null
    [[ $side == A ]] || taken
    for concurrency in $CONCURRENCY; do load "$side" "r$round-c$concurrency" "$concurrency"; done
    if [[ $TRACE == 1 && $round == 1 ]]; then
      PROMPTS_PER=1 OSL=4 load "$side" trace 1 --profile
    fi
    stop
  done
done

python - "$OUT" <<'PY'
import json, pathlib, statistics, sys
out = pathlib.Path(sys.argv[1])
found = {}
for path in out.glob("[AB]-r*-c*.json"):
    side, _, concurrency = path.stem.split("-")
    found.setdefault(int(concurrency[1:]), {}).setdefault(side, []).append(json.loads(path.read_text()))
print("| concurrency | tokens/s A | tokens/s B | B beside A | TTFT ms A | TTFT ms B | B beside A |\n" + "| --- " * 7 + "|")
for concurrency, sides in sorted(found.items()):
    cells = [str(concurrency)]
    for field, form in (("total_token_throughput", "{:.1f}"), ("median_ttft_ms", "{:.1f}")):
        a, b = (statistics.median(run[field] for run in sides[side]) for side in "AB")
        cells += [form.format(a), form.format(b), f"{b / a - 1:+.1%}"]
    print("| " + " | ".join(cells) + " |")
PY

if [[ $TRACE == 1 ]]; then
  # Of several ranks rank 0; where names tell no rank, the largest: the front end's own trace has no kernels.
  first() {
    local found
    found=$(find "$1" -name '*rank0*.json.gz' | sort | head -n 1)
    [[ -n $found ]] || found=$(find "$1" -name '*.json.gz' -printf '%s %p\n' | sort -k1,1nr | head -n 1 | cut -d' ' -f2-)
    [[ -n $found ]] || { echo "vllm_ab: no trace in $1" >&2; return 1; }
    echo "$found"
  }
  # Two lines: a line's status is that of its last substitution.
  TRACE_A=$(first "$OUT/traces-A")
  TRACE_B=$(first "$OUT/traces-B")
  lightning-indexer trace-diff "$TRACE_A" "$TRACE_B"
  lightning-indexer trace-diff "$TRACE_A" "$TRACE_B" --json > "$OUT/trace-diff.json"
fi
