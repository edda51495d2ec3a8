"""Files of keys and tenants, and how wrong ones are refused."""

import hashlib
from pathlib import Path

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.tenants.api_keys import read_digests, read_key_file
from tokenloom.services.gateway.tenants.tenant import TenantLimits

ONE, TWO, THREE = (hashlib.sha256(name).hexdigest() for name in (b"one", b"two", b"three"))


def write(directory: Path, text: str) -> Path:
    file = directory / "keys"
    file.write_text(text)
    return file


def test_digests_on_lines(tmp_path: Path) -> None:
    file = write(tmp_path, f"# ours\n\n{ONE.upper()}  # Ada's [[tenant]]\n{TWO}\n")
    assert read_key_file(file, "keys") == [bytes.fromhex(ONE), bytes.fromhex(TWO)]
    assert read_digests(file, "keys") == [bytes.fromhex(ONE), bytes.fromhex(TWO)]


def test_tenants_in_toml(tmp_path: Path) -> None:
    text = f"""
    [[tenant]]  # indented or not
    name = "search.eu"
    key_sha256 = ["{ONE}", "{TWO.upper()}"]
    cache = "shared"
    [tenant.limits]
    tokens_per_second = 1000
    live_outputs = 64

    [[tenant]]
    name = "archive"
    key_sha256 = ["{THREE}"]
    """
    search, archive = read_key_file(write(tmp_path, text), "keys")
    assert not isinstance(search, bytes)
    assert not isinstance(archive, bytes)
    assert list(search.digests()) == [bytes.fromhex(ONE), bytes.fromhex(TWO)]
    assert (search.name, search.cache) == ("search.eu", "shared")
    assert search.limits == TenantLimits(tokens_per_second=1000.0, live_outputs=64)
    assert (archive.name, archive.cache, archive.limits) == ("archive", None, TenantLimits())


TENANT = f'[[tenant]]\nname = "search"\nkey_sha256 = ["{ONE}"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sk-secret\n", "line 1 is not the hex SHA-256 of a key"),
        (f"{ONE}\nsk-secret\n", "line 2 is not the hex SHA-256 of a key"),
        (f"{ONE}\n{TENANT}", "not valid TOML: at line 1, column"),
        ('[[tenant]]\nname = "sk-secret\n', "not valid TOML: at line 2, column"),
        ("[[tenant]]\nname = 'sk-secret\n", "not valid TOML: at end of document"),
        ("[tenant]\nname = 'a'\n", "each tenant must begin with [[tenant]]"),
        ("[limits]\n", "may contain only [[tenant]] tables, not 'limits'"),
        (f"{TENANT}[other]\n", "may contain only [[tenant]] tables, not 'other'"),
        (f"{TENANT}{TENANT}", "two tenants have the name 'search'"),
        (f"{TENANT}[[tenant]]\nkey_sha256 = ['{TWO}']\n", "tenant 2: Object missing required field `name`"),
        ("[[tenant]]\nname = 'a'\n", "tenant 1 ('a'): Object missing required field `key_sha256`"),
        ("[[tenant]]\nname = 'a'\nkey_sha256 = []\n", "tenant 1 ('a'): Expected `array` of length >= 1"),
        ("[[tenant]]\nname = 'a b'\nkey_sha256 = ['x']\n", "tenant 1 ('a b'): Expected `str` matching regex"),
        (f"[[tenant]]\nname = 'key:a'\nkey_sha256 = ['{ONE}']\n", "tenant 1 ('key:a'): Expected `str` matching"),
        (f"{TENANT}cache = 'key:a'\n", "tenant 1 ('search'): Expected `str` matching regex"),
        (f"{TENANT}keys = []\n", "tenant 1 ('search'): Object contains unknown field `keys`"),
        (
            "[[tenant]]\nname = 'a'\nkey_sha256 = ['sk-secret']\n",
            "tenant 1 ('a'): key_sha256[0] is not the hex SHA-256",
        ),
        (f"{TENANT}[tenant.limits]\nlive = 1\n", "unknown field `live` - at `$.limits`"),
        (f"{TENANT}[tenant.limits]\nlive_outputs = 0\n", "Expected `int` >= 1 - at `$.limits.live_outputs`"),
        (f"{TENANT}[tenant.limits]\ntokens_per_second = nan\n", "tokens_per_second"),
    ],
)
def test_wrong_files_are_refused_without_repeating_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_key_file(write(tmp_path, text), "api_key_file")
    assert message in caught.value.message
    assert caught.value.message.startswith("api_key_file: ")
    assert caught.value.field == "api_key_file"
    assert "sk-secret" not in caught.value.message


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read 'missing'"):
        read_key_file(tmp_path / "missing", "api_key_file")
