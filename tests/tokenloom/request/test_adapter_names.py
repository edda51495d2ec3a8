from tokenloom.request.adapter_names import adapter_salt
from tokenloom.request.prefix_schedule import block_hashes

ONE, OTHER = b"\x01" * 32, b"\x02" * 32


def test_the_base_model_keeps_the_tenants_salt() -> None:
    assert adapter_salt(b"tenant", b"") == b"tenant"
    assert adapter_salt(b"", b"") == b""


def test_adapters_and_tenants_all_have_salts_of_their_own() -> None:
    salts = [adapter_salt(salt, digest) for salt in (b"", b"tenant") for digest in (b"", ONE, OTHER)]
    assert len(set(salts)) == 6
    hashes = [block_hashes(range(16), 16, salt=salt)[0] for salt in salts]
    assert len(set(hashes)) == 6


def test_the_salt_is_the_same_in_every_process() -> None:
    assert adapter_salt(b"tenant", ONE).hex() == "bcc83b96f9e3007c15445cce23141bb0"
