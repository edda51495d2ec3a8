# Defines `part`, which starts one service with its certificate, and stops all of them when the script ends.
# The caller sets `certs`, the folder that `tokenloom certs --by-part` made. PYTHON names another interpreter.
trap 'trap - TERM INT EXIT; kill $(jobs -p) 2>/dev/null || true; wait' TERM INT EXIT

part() {
    local service=$1 own=$certs/${1//_/-}
    shift
    "${PYTHON:-python3}" -m "tokenloom.services.$service" \
        --tls-ca "$own/ca.crt" --tls-cert "$own/tls.crt" --tls-key "$own/tls.key" "$@" &
}
