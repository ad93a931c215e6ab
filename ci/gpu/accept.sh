#!/bin/sh
# The one command for a GPU machine with the NGC image: build the small profile, serve it, hold it to the contract
# suite, and write one report. ci/gpu/accept.sh [REPORT]   (default: accept-report.txt)
. "$(dirname "$0")/environment"
need_gpu_image
install_product
report=${1:-accept-report.txt}
profile=engines/profiles/smollm2-135m-gpu.yaml
work=$(mktemp -d)
server=
finish() {
    status=$?
    [ -z "$server" ] || { kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true; }
    cp "$work/triton.log" "$report.triton.log" 2>/dev/null || true
    rm -rf "$work"
    echo "report: $report (code $status)"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { echo "== $*" | tee -a "$report"; }
check() { # WHAT COMMAND...: run it, keep its output in the report, go on with a note if it fails
    say "$1"
    shift
    if "$@" >>"$report" 2>&1; then say "passed"; else say "FAILED (code $?)" && failed=1; fi
}

failed=0
: >"$report"
say "machine"
{
    date -u
    nvidia-smi -L
    python3 -c 'import tensorrt_llm; print("TensorRT-LLM", tensorrt_llm.__version__)' 2>/dev/null | tail -n 1
    git rev-parse HEAD 2>/dev/null || true
} >>"$report"

say "build $profile"
lora-slots engine build "$profile" -o "$work/engine" 2>&1 | tee -a "$report"
check "engine is the profile's" lora-slots engine verify "$work/engine" "$profile" --files

printf 'schema: 1\nadapters: {}\n' >"$work/adapters.yaml"
# the contract suite wants the runtime's default here, and every LoRA parameter set
mkdir "$work/prefetch"
lora-slots repo render "$profile" --engine "$work/engine" --registry "$work/adapters.yaml" -o "$work/models" \
    --set exclude_input_in_output=false --set "lora_prefetch_dir=$work/prefetch" 2>&1 | tee -a "$report"
check "repository has no mistakes" lora-slots repo check "$work/models" --engine "$work/engine"
check "capacity plan" lora-slots plan "$profile" --fleet 100x16,10x64

say "serve"
tritonserver --model-repository "$work/models" --http-address 127.0.0.1 --grpc-address 127.0.0.1 \
    >"$work/triton.log" 2>&1 &
server=$!
ready() { python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8000/v2/health/ready", timeout=2)' 2>/dev/null; }
for _ in $(seq 180); do
    ready && break
    kill -0 "$server" 2>/dev/null || { tail -n 40 "$work/triton.log" | tee -a "$report"; exit 1; }
    sleep 1
done
ready || { tail -n 40 "$work/triton.log" | tee -a "$report"; exit 1; }

python3 -m pip install --quiet pytest pytest-timeout
check "contract suite" python3 -m pytest -q tests/contract --triton grpc://127.0.0.1:8001 --engine "$work/engine"
grep -E 'Max LoRA size is|LoRA (host|device) Cache can hold|bytes for LoRA' "$work/triton.log" >>"$report" || true
exit "$failed"
