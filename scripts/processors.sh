#!/usr/bin/env bash
# Runs a command as if on four other processors, and fails if one of the four runs fails:
#   scripts/processors.sh .venv/bin/python -m pytest -m processor
# oneDNN, ATen and MKL are told to use fewer instructions than this processor has. Settings that it lacks anyway change nothing.
set -u
failed=0
while IFS='|' read -r name settings; do
    began=$SECONDS
    echo "== $name: $settings"
    # shellcheck disable=SC2086
    if env $settings "$@"; then word=passes; else word=FAILS failed=1; fi
    echo "== $name: $word, $((SECONDS - began)) s"
done <<'PROCESSORS'
one thread|OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
AVX2 without VNNI|ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
no vector extension|ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
AVX-512 without VNNI and AMX|ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE
PROCESSORS
exit $failed
