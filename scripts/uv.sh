# Sourced behind env.sh by scripts that make environments of other people's packages: uv resolves in
# seconds what takes pip minutes.
uv_version=0.13.9

# Put uv into $1/uv, for as long as the caller leaves it there.
install_uv() {
  "$bin/python" -m pip install --quiet --no-deps --target "$1/uv" "uv==$uv_version" >&2
  export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-$("$bin/python" -m pip config get global.cert 2>/dev/null || true)}}
  [[ -n $SSL_CERT_FILE ]] || unset SSL_CERT_FILE
}
