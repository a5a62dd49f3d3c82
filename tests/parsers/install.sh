#!/usr/bin/env bash
# Makes an environment with the frameworks' own parsers: tests/parsers/install.sh .venv-parsers
# Then: PLANNER_PARSERS_PYTHON=.venv-parsers/bin/python .venv/bin/python -m pytest -m parsers
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${1:?usage: install.sh FOLDER}"
python3 -m venv "$folder"
"$folder/bin/pip" install -q -r "$here/requirements.txt"
# Pure Python of these two is all that is needed; their metadata asks for Python 3.12, their wheels run on 3.11, too.
"$folder/bin/pip" install -q --no-deps --ignore-requires-python megatron-core==0.19.2 megatron-bridge==0.6.2
