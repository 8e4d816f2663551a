#!/usr/bin/env bash
# Versions:  GCC 12.2.0 (Debian 12), for x86-64 with AVX2 and FMA; what it compiles is read, not run.
# Guess:     -ffp-contract=fast makes one fused operation of a product and the sum it is added to, wherever the target
#            has one: a dot product has the same bits computed by itself and beside others in the same loop.
# Behaviour: not where GCC tunes for AMD's Zen 2 and later (-march=native chooses that there). A loop with a single chain
#            of sums multiplies, rounds, and adds, as that chain is faster so; the same loop with two sums is fused. A
#            kernel instantiated for 1 row and for 4 then gives a row other last bits alone than in a batch, on some
#            machines and on no Intel one. --param=avoid-fma-max-bits=0 fuses both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/dots.c" <<'PROGRAM'
typedef float vec __attribute__((vector_size(32)));
void dots(const vec *x, const vec *a, long n, float *out) {
    vec sums[SUMS] = {{0}};
    for (long i = 0; i < n; i++)
        for (int j = 0; j < SUMS; j++) sums[j] += x[i] * a[j * n + i];
    for (int j = 0; j < SUMS; j++) {
        out[j] = 0;
        for (int lane = 0; lane < 8; lane++) out[j] += sums[j][lane];
    }
}
PROGRAM
gcc --version | head -1
fused() { # TUNE SUMS OPTIONS...: the number of fused vector operations
  gcc -O3 -mavx2 -mfma -mtune="$1" -ffp-contract=fast -DSUMS="$2" "${@:3}" -S -o - "$folder/dots.c" |
    grep -c 'vfmadd.*ps' || true
}
seen=
for tune in haswell skylake-avx512 znver2 znver3; do
  found="$(fused $tune 1) $(fused $tune 2) $(fused $tune 1 --param=avoid-fma-max-bits=0)"
  echo "-mtune=$tune: fused with one sum, with two, with one and the parameter: $found"
  seen+="$found, "
done
[[ $seen == "1 2 1, 1 2 1, 0 2 1, 0 2 1, " ]]
