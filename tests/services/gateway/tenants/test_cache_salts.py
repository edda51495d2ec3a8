"""Salts of cached prefixes: equal exactly for equal secrets and cache names."""

import logging
from pathlib import Path

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.tenants.tenant import SALT_BYTES, CacheSalts

SECRET = "0123456789abcdef"


def salts(secret: str, file: Path | None = None) -> CacheSalts:
    loaded = CacheSalts.load(secret, file)
    assert loaded is not None
    return loaded


def test_a_salt_follows_from_secret_and_name() -> None:
    salt = salts(SECRET).of("a")
    assert len(salt) == SALT_BYTES
    assert salt == salts(SECRET).of("a")
    assert len({salt, salts(SECRET).of("b"), salts(SECRET + "0").of("a"), CacheSalts.draw().of("a")}) == 4


def test_the_file_wins_and_spaces_around_the_secret_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"  {SECRET}\n")
    assert salts("another secret of the mesh", file).of("a") == salts(f"{SECRET}\n").of("a")
    assert CacheSalts.load("", None) is None


def test_short_and_unreadable_secrets_are_refused_without_repeating_them(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2hunter2\n\n\n\n")
    with pytest.raises(InvalidArgument, match="at least 16 bytes, not 14") as caught:
        CacheSalts.load("", file)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="cannot read 'missing'"):
        CacheSalts.load("", tmp_path / "missing")


def test_a_random_secret_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CacheSalts.draw()
    assert "--cache-salt-secret-file" in caplog.text
