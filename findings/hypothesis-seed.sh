#!/usr/bin/env bash
# Versions:  Hypothesis 6.170.15, pytest 9.0.2 (Python 3.11 to 3.13).
# Guess:     `pytest --hypothesis-seed=N` only chooses the examples that are generated. What fails is still kept
#            in the example database, and tried first by the next run.
# Behaviour: with the option a test has no database key at all: nothing that fails is kept, and what an earlier
#            run has kept is not tried. A CI job that draws a seed for each run, so that a failure can be repeated,
#            thereby loses the database: the next run, with another seed, may pass.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check hypothesis==6.170.15 pytest==9.0.2
cd "$folder"
cat >test_it.py <<'TEST'
from hypothesis import given, settings, strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

first = []

@settings(database=DirectoryBasedExampleDatabase("kept"), max_examples=200)
@given(st.integers(0, 10**6))
def test_it(number):
    if not first:
        first.append(number)
        print("first:", number)
    assert number < 1000
TEST

run() { # what the property tries first, and how many files there are in the database
  local said
  said=$(venv/bin/python -m pytest -q -p no:cacheprovider "$@" test_it.py || true)
  echo "$(grep -m1 -o 'first: [0-9]*' <<<"$said"), kept: $(find kept -type f 2>/dev/null | wc -l)"
}

with_seed=$(run --hypothesis-seed=1)
without=$(run)
again=$(run)
seeded_again=$(run --hypothesis-seed=2)
printf '%s\n' "with a seed:            $with_seed" "without:                $without" \
  "without, once more:     $again" "with another seed then: $seeded_again"
[[ $with_seed == *"kept: 0" && $without != *"kept: 0" ]] || { echo "a seed no longer keeps failures out"; exit 1; }
[[ $again == "first: 1000,"* ]] || { echo "what failed is no longer tried first"; exit 1; }
[[ $seeded_again != "first: 1000,"* ]] || { echo "a seed no longer keeps from trying what failed"; exit 1; }
