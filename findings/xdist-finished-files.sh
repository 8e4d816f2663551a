#!/usr/bin/env bash
# Versions:  pytest-xdist 3.8.0, pytest 9.0.2 (Python 3.11 to 3.13).
# Guess:     where a process of `pytest -n 1 --dist loadfile` dies, its test has failed, another process takes its
#            place, and the run goes on with what was not begun, as with `--dist load`.
# Behaviour: the run waits for ever. The dead process' files are given out again, those that it had finished first:
#            of such a file the new process is sent no test, so it reports none, and only a report makes the
#            scheduler give out the next file. pytest-timeout does not end it: no test runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pytest-xdist==3.8.0 pytest==9.0.2
cd "$folder"
printf '%s\n' 'def test_first(): ...' 'def test_second(): ...' >test_a.py
printf '%s\n' 'import os' 'def test_kills(): os.kill(os.getpid(), 9)' 'def test_behind_it(): ...' >test_b.py

run() { # the exit code (124: still running after a minute), and what was said last
  local status=0
  timeout -k 5 60 venv/bin/python -m pytest -n 1 -p no:cacheprovider "$@" >said 2>&1 || status=$?
  echo "$status: $(tail -n 1 said)"
}

by_test=$(run --dist load)
by_file=$(run --dist loadfile)
printf '%s\n' "--dist load:     $by_test" "--dist loadfile: $by_file"
[[ $by_test == "1: "*"1 failed, 3 passed"* ]] || { echo "--dist load no longer goes on behind a death"; exit 1; }
[[ $by_file == "124: "* ]] || { echo "--dist loadfile no longer waits for ever"; exit 1; }
