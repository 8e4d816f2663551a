# Sourced by the scripts beside this: sets $root and $bin, and sees to it that .venv in the
# repository's root holds what pyproject.toml and constraints.txt ask for. PYTHON names another
# interpreter than python3 to make it with.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=$root/.venv/bin
stamp=$root/.venv/.installed-$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr ' ' -)
if [[ ! -e $stamp ]]; then
  echo "setting up $root/.venv (once; a few minutes where torch has to be downloaded)" >&2
  [[ -x $bin/python ]] || "${PYTHON:-python3}" -m venv "$root/.venv"
  "$bin/python" -m pip install --quiet -c "$root/constraints.txt" -e "$root[dev]" >&2
  rm -f "$root"/.venv/.installed-*
  touch "$stamp"
fi
