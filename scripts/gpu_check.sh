#!/usr/bin/env bash
# Verify and measure the CUDA kernels on this machine's GPU: no Python, no network, a few minutes.
#
#   scripts/gpu_check.sh [TABLE]        writes TABLE.md and TABLE.json (default: gpu_check)
#   scripts/gpu_check.sh --emulate [TABLE]
#                                       the same program on the CPU: no GPU, tiny sizes, no gates on speed
#
# Builds one program with the nvcc that is here (NVCC=... chooses one; CXX=... the compiler of --emulate),
# compares every kernel with a reference that moves one element at a time, and times it against a device copy.
# Exit status: 0 all good, 1 a kernel is wrong or too slow, 2 this machine cannot run the check.
set -euo pipefail

fail() {
  echo "gpu_check: $1" >&2
  exit 2
}

emulate=false
if [ "${1:-}" = "--emulate" ]; then
  emulate=true
  shift
fi
table="$(realpath -m "${1:-gpu_check}")"
cd "$(dirname "$0")/.."
build="${GPU_CHECK_BUILD:-$(mktemp -d)}"
[ -n "${GPU_CHECK_BUILD:-}" ] || trap 'rm -rf "$build"' EXIT
includes=(-Icsrc -Itests/cpp)
sources=(csrc/reshard/program.cpp tests/cpp/reshard_reference.cpp)

if $emulate; then
  "${CXX:-g++}" -std=c++17 -O1 -DASYNCRL_EMULATE_CUDA -Wno-unknown-pragmas "${includes[@]}" -x c++ \
    "${sources[@]}" csrc/reshard/kernels.cu tests/cpp/gpu_check.cu -o "$build/gpu_check"
  "$build/gpu_check" "$table.md" "$table.json" 1 1 20 --no-gates
  exit
fi

nvcc="${NVCC:-$(command -v nvcc || true)}"
[ -n "$nvcc" ] || { [ -x /usr/local/cuda/bin/nvcc ] && nvcc=/usr/local/cuda/bin/nvcc; } ||
  fail "nvcc was not found; install the CUDA toolkit, put it on PATH or set NVCC"
capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader --id=0 2>/dev/null | tr -d '. \n' || true)"
if [ -n "$capability" ] && "$nvcc" --list-gpu-code | grep -qx "sm_$capability"; then
  targets="sm_$capability"
  architecture=(-gencode "arch=compute_$capability,code=sm_$capability")
else # the driver compiles the last one for GPUs that this nvcc does not know
  targets="sm_80, sm_90 and later"
  architecture=(-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90)
  architecture+=(-gencode arch=compute_90,code=compute_90)
fi
echo "gpu_check: building for $targets with $nvcc" >&2
"$nvcc" -std=c++17 -O2 "${architecture[@]}" "${includes[@]}" "${sources[@]}" csrc/reshard/kernels.cu \
  tests/cpp/gpu_check.cu -o "$build/gpu_check" || fail "the kernels did not build with $nvcc"
status=0
timeout 200 "$build/gpu_check" "$table.md" "$table.json" || status=$?
if [ "$status" -eq 124 ]; then
  echo "gpu_check: not done after 200 s; a kernel hangs, or the GPU is busy" >&2
  status=1
fi
exit "$status"
