#!/bin/sh
# Finds a Python that is new enough and hands over to setup.py. A name on the PATH proves nothing (version
# managers leave names there that refuse to run), so each candidate is asked.
set -eu
cd "$(dirname "$0")/.."

for name in "${PYTHON:-}" .venv/bin/python python3.13 python3.12 python3.11 python3 python; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        exec "$name" tools/setup.py </dev/null
    fi
done
if command -v uv >/dev/null 2>&1; then
    echo "setup: no Python 3.11 or newer here; uv gets one" >&2
    exec uv run --quiet --no-project --python 3.12 tools/setup.py </dev/null
fi
echo "setup: no Python 3.11 or newer was found (tried python3.13, python3.12, python3.11, python3)." >&2
echo "setup: install one (Debian: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python" >&2
exit 1
