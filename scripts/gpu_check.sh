#!/usr/bin/env bash
# Verify and measure the CUDA kernels on this machine's GPU; no network is used, a few minutes.
#
#   scripts/gpu_check.sh [TABLE.md]
#
# Builds the extension with the nvcc and torch that are here, compares every kernel with plain torch, times it
# against a device copy, and writes the table. Exit status: 0 all good, 1 a kernel is wrong or too slow,
# 2 this machine cannot run the check.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
[ -x .venv/bin/python ] && python="${PYTHON:-.venv/bin/python}"

if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  echo "gpu_check: nvcc was not found; install the CUDA toolkit or put it on PATH" >&2
  exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "gpu_check: $python has no torch that sees a GPU; set PYTHON to one that does" >&2
  exit 2
fi
"$python" setup.py --quiet build_ext --inplace
PYTHONPATH=. exec "$python" scripts/gpu_check.py "${1:-gpu_check.md}"
