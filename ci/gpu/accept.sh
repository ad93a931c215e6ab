#!/bin/sh
# The one command for a GPU machine with the NGC image: build a profile, serve it, hold it to the contract suite, measure
# it, and write one report. ci/gpu/accept.sh [REPORT [PROFILE]]
#   REPORT    default accept-report.txt; Triton's log goes beside it as REPORT.triton.log
#   PROFILE   default engines/profiles/smollm2-135m-gpu.yaml
# LORA_SLOTS_ENGINE=DIR takes an engine that is built already. Exit code 0: everything passed; 1: something did not, and
# the report says what; 69: this machine cannot do it, and nothing was written.
# shellcheck source=ci/gpu/environment
. "$(dirname "$0")/environment"
need_gpu_image
report=${1:-accept-report.txt}
profile=${2:-engines/profiles/smollm2-135m-gpu.yaml}
install_product pytest pytest-timeout
work=$(mktemp -d)
engine=${LORA_SLOTS_ENGINE:-$work/engine}
server='' failed=0

# shellcheck disable=SC2329 # the trap calls it
finish() {
    status=$?
    [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server" 2>/dev/null || true; }
    cp "$work/triton.log" "$report.triton.log" 2>/dev/null || true
    rm -rf "$work"
    echo "report: $report (code $status)"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { echo "== $*" | tee -a "$report"; }

must() { # WHAT COMMAND...: run it, its output also in the report as it comes; what follows needs it
    say "$1"
    shift
    { "$@" 2>&1 && echo 0 >"$work/status" || echo $? >"$work/status"; } | tee -a "$report"
    [ "$(cat "$work/status")" = 0 ] || { say "FAILED (code $(cat "$work/status")): nothing more can be done" && exit 1; }
}

check() { # WHAT COMMAND...: run it, its output in the report; go on if it fails
    say "$1"
    shift
    if "$@" >>"$report" 2>&1; then say "passed"; else say "FAILED (code $?)" && failed=1; fi
}

ready() {
    python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000/v2/health/ready", timeout=2)' 2>/dev/null
}

serve() {
    tritonserver --model-repository "$work/models" --http-address 127.0.0.1 --grpc-address 127.0.0.1 \
        >"$work/triton.log" 2>&1 &
    server=$!
    for _ in $(seq 300); do
        ! ready || return 0
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    say "FAILED: the server is not ready; the end of its log:"
    tail -n 40 "$work/triton.log" | tee -a "$report"
    exit 1
}

: >"$report"
say "machine"
{
    date -u
    nvidia-smi -L
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null || true
    python3 -c 'import tensorrt_llm; print("TensorRT-LLM", tensorrt_llm.__version__)' 2>/dev/null | tail -n 1
    git rev-parse HEAD 2>/dev/null || true
} >>"$report"

if [ -z "${LORA_SLOTS_ENGINE:-}" ]; then
    must "build $profile" lora-slots engine build "$profile" -o "$engine"
fi
must "the engine is the profile's, byte for byte what was built" lora-slots engine verify "$engine" "$profile" --files
check "capacity plan" lora-slots plan "$profile"

printf 'schema: 1\nadapters: {}\n' >"$work/adapters.yaml"
# the contract suite wants the runtime's default for exclude_input_in_output, and every LoRA parameter set; but the
# prefetch takes float16 files only
set -- --set exclude_input_in_output=false
if grep -Eq '"dtype": *"float16"' "$engine/config.json"; then
    mkdir "$work/prefetch"
    set -- "$@" --set "lora_prefetch_dir=$work/prefetch"
fi
must "render" lora-slots repo render "$profile" --engine "$engine" --registry "$work/adapters.yaml" -o "$work/models" \
    "$@"
check "the repository has no mistakes" lora-slots repo check "$work/models" --engine "$engine"

say "serve"
serve
check "contract suite" python3 -m pytest -q -p no:cacheprovider tests/contract \
    --triton grpc://127.0.0.1:8001 --engine "$engine"
check "bench: streams, adapters, binds" python3 bench/served.py --url 127.0.0.1:8001 --engine "$engine"
check "bench: conversion" python3 bench/convert.py --case small
check "bench: a decision of the slot machine" python3 bench/slots.py
say "what the runtime said of its LoRA caches"
grep -E 'Max LoRA size is|LoRA (host|device) Cache can hold|bytes for LoRA' "$work/triton.log" >>"$report" || true
if [ "$failed" -eq 0 ]; then say "everything passed"; else say "something FAILED"; fi
exit "$failed"
