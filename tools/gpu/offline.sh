#!/usr/bin/env bash
# Everything that `nox -s gpu` looks at, on a machine without a package index, from the sources: bash tools/gpu/offline.sh
#
# Needs Python 3.10 or newer with torch, attrs, tqdm, typing-extensions, numpy, safetensors, xxhash, pytest,
# pytest-timeout, pytest-xdist and hypothesis. Ends in 560 seconds (SECONDS_IN_ALL). What each part finds is in $OUT (default: build/gpu)
# when the part is over: <device>.json, <device>.md, tests.xml, tests.log, <device>-profile.json.gz, log.txt.
# Arguments are those of `python tools/gpu`; where there is no GPU, `--device cpu --tiny` tries every part.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
OUT=${OUT:-build/gpu} PYTHON=${PYTHON:-python3} SECONDS_IN_ALL=${SECONDS_IN_ALL:-560}
mkdir -p "$OUT" || exit 2
export PYTHONPATH="$(printf '%s:' "$PWD"/packages/*/src)$PWD:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

needed="torch attrs tqdm typing_extensions numpy safetensors xxhash pytest pytest_timeout xdist hypothesis"
missing=$("$PYTHON" -c "
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))" $needed) || exit 2
if [ -n "$missing" ]; then
    echo "$PYTHON lacks $missing: install them, or set PYTHON to one that has them" >&2
    exit 2
fi
# Ranks meet over it, one rank too.
loopback='import socket; server = socket.create_server(("127.0.0.1", 0)); socket.create_connection(server.getsockname())'
if ! "$PYTHON" -c "$loopback" 2>/dev/null; then
    ip link set lo up 2>/dev/null
    if ! "$PYTHON" -c "$loopback" 2>/dev/null; then
        echo "the loopback interface is down: call \`ip link set lo up\` as root, then this again" >&2
        exit 2
    fi
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
timeout --kill-after=5 "$((SECONDS_IN_ALL - 5))" "$PYTHON" tools/gpu --budget "$((SECONDS_IN_ALL - 20))" --out "$OUT" "$@" 2>&1 | tee "$OUT/log.txt"
status=${PIPESTATUS[0]}
ls -l "$OUT"
exit "$status"
