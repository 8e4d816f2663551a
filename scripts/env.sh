# Sourced by the scripts beside this, with `run` or `dev` (see set-up): sets $root and $bin, and sees
# to it that .venv in the repository's root holds what pyproject.toml and constraints.txt ask for.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bin=$root/.venv/bin
"$root/scripts/set-up" "$1"
