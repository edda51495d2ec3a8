"""What the options of a store may say, and what keeps an engine's blocks outside of its pool."""

import pytest

from tests.services.engine.peer import make_settings
from tokenloom.engine_core.core_ready import encoder_config
from tokenloom.engine_core.data.config import EngineConfig, KVConfig
from tokenloom.engine_core.data.kv_config import StorePlace, store_place
from tokenloom.offline.engine_args import EngineArgs, engine_config
from tokenloom.offline.offline_loop import start_core


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///var/kv", StorePlace("/var/kv")),
        ("file:///a%20b", StorePlace("/a b")),
        ("lm://store:65432", StorePlace("", "store", 65432)),
        ("lm://[::1]:1/", StorePlace("", "::1", 1)),
    ],
)
def test_where_a_store_is(url: str, place: StorePlace) -> None:
    assert store_place(url) == place


@pytest.mark.parametrize(
    "url",
    ["/var/kv", "file:///", "file://host/kv", "file:kv", "file:///kv?x=1", "lm://store", "lm://store:0", "lm://:1",
     "lm://user@store:1", "lm://store:1/path", "lm://store:99999", "redis://store:1", "acme:own", "lm://[::1"],
)  # fmt: skip
def test_what_names_no_store(url: str, tmp_path: object) -> None:
    with pytest.raises(ValueError, match=r"kv_store: .*(must be file:///FOLDER or lm://HOST:PORT|is no URL)"):
        engine_config({"kv_store": url})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_store": "file:///kv"}, "kv_store: a folder needs kv_store_bytes"),
        ({"kv_store": "lm://h:1", "kv_store_bytes": 5}, "kv_store_bytes: bounds a folder"),
        ({"kv_store_bytes": 5}, "kv_store_bytes: there is no kv_store"),
        ({"kv_store": "lm://h:1", "enable_prefix_caching": False}, "kv_store: .*set enable_prefix_caching"),
        ({"kv_store": "lm://h:1", "kv_store_timeout": 0}, "kv_store_timeout"),
        ({"kv_store": "lm://h:1", "kv_store_timeout": 1e10}, "kv_store_timeout"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_start(
    options: dict[str, object], words: str, socket_dir: object
) -> None:
    with pytest.raises(ValueError, match=words):
        engine_config(options)
    with pytest.raises(ValueError, match=words.replace("kv_store_timeout", "kv.store.timeout")):
        make_settings(socket_dir, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["offload_path", "store", "connector"])
def test_each_tier_is_refused_by_its_name(option: str) -> None:
    config = EngineConfig(kv=KVConfig(**{option: "lm://h:1"}))  # type: ignore[arg-type]
    named = f"kv_{option}"
    assert config.kv.tier == named
    with pytest.raises(ValueError, match=f"an encoder keeps no KV and no states; do not set {named}$"):
        encoder_config(config, 64)
    with pytest.raises(ValueError, match=f"do not set {named}$"):
        config.check_cross()
    with pytest.raises(ValueError, match=f"{named}: a core in this process loads no KV blocks; set engine_process"):
        start_core(config, has_own_process=False)
    assert EngineConfig().kv.tier == ""


def test_the_options_are_those_of_a_program_too() -> None:
    args = EngineArgs("m", kv_store="file:///kv", kv_store_bytes=1 << 20, kv_store_timeout=0.5)
    kv = args.config.kv
    assert (kv.store, kv.store_bytes, kv.store_timeout_seconds) == ("file:///kv", 1 << 20, 0.5)
