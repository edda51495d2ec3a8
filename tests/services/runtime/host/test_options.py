"""From annotated fields to options and back."""

import logging
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from tokenloom.engine_core.data.config import EngineConfig, StructuredOutputConfig
from tokenloom.services.runtime.host.options import OptionError, UnknownOption, build, options_of

Share = Annotated[float, Meta(ge=0, lt=1)]


class TwoWordsConfig(Struct, frozen=True):
    share: Annotated[Share, "A share.", Meta(extra={"name": "inner_share", "aliases": ("part",)})] = 0.5
    filled_in: int = 0


class Settings(Struct, frozen=True):
    size: Annotated[Annotated[int, Meta(ge=1)] | None, "A size."]
    kind: Annotated[Literal["new", "other"], "A kind.", Meta(extra={"renamed": {"old": "new"}})] = "new"
    path: Annotated[Path | None, "A path."] = None
    names: Annotated[tuple[str, ...], "Names."] = ()
    numbers: Annotated[tuple[int, ...], "Numbers."] = ()
    on: Annotated[bool, "A switch."] = False
    key: Annotated[Annotated[int, Meta(ge=1)], "A key.", Meta(extra={"secret": True})] = 1
    group: TwoWordsConfig = TwoWordsConfig(share=0.25)


def make(**values: Any) -> Settings:
    return build(Settings, {"size": 1, **values})


def test_fields_with_a_text_are_options_under_flat_names() -> None:
    options = options_of(Settings)
    assert list(options) == ["size", "kind", "path", "names", "numbers", "on", "key", "inner_share"]
    share = options["inner_share"]
    assert (share.path, share.group, share.default) == (("group", "share"), "Two words", 0.25)
    assert share.names == ("inner_share", "part")
    assert (share.kind, options["kind"].choices) == ("number ≥ 0, < 1", ("new", "other"))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "7", 7),
        ("size", "none", None),
        ("path", "a/b", Path("a/b")),
        ("path", "", None),
        ("names", "a, b,", ("a", "b")),
        ("names", ["a,b", "c"], ("a", "b", "c")),
        ("numbers", "1, 2", (1, 2)),
        ("numbers", [1, 2], (1, 2)),
        ("on", "yes", True),
        ("on", "0", False),
    ],
)
def test_text_becomes_the_type_of_the_field(name: str, text: object, value: object) -> None:
    assert getattr(make(**{name: text}), name) == value


def test_values_find_their_struct() -> None:
    assert make(part=0.75).group == TwoWordsConfig(share=0.75)
    assert make().group == TwoWordsConfig(share=0.25)


def test_an_instance_gives_defaults_and_is_copied() -> None:
    base = EngineConfig(structured_output=StructuredOutputConfig())
    assert "structured_outputs_backend" in options_of(base)
    changed = build(base, {"structured_outputs_backend": "xgrammar", "num_gpu_blocks_override": 3}, strict=True)
    assert changed.structured_output == StructuredOutputConfig("xgrammar")
    assert changed.cache.num_blocks == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "x"}, "size: must be an integer ≥ 1, not 'x'"),
        ({"part": 1}, "part: must be a number ≥ 0, < 1, not 1"),
        ({"kind": "x"}, "kind: must be one of new, other, not 'x'"),
        ({"on": "maybe"}, "on: must be true or false, not 'maybe'"),
        ({"key": 0}, "key: must be an integer ≥ 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        make(**values)
    assert str(error.value) == message


@pytest.mark.parametrize("size", [1e300, float("nan"), float("inf"), -1])
def test_a_size_that_no_memory_has_is_refused(size: float) -> None:
    with pytest.raises(OptionError, match=r"cpu_offload_gb: must be a number ≥ 0, ≤ 1048576, not "):
        build(EngineConfig, {"cpu_offload_gb": size})


def test_a_value_of_other_servers_is_refused_with_the_alternative() -> None:
    with pytest.raises(OptionError) as error:
        build(EngineConfig, {"kv_cache_dtype": "fp8_e5m2"})
    assert str(error.value) == (
        "kv_cache_dtype: must be one of auto, int8, fp8, not 'fp8_e5m2'; only fp8 (e4m3) is supported; it takes the "
        "same memory"
    )
    with pytest.raises(OptionError, match=r"kv_cache_dtype: must be one of auto, int8, fp8, not 'int3'$"):
        build(EngineConfig, {"kv_cache_dtype": "int3"})


def test_unknown_and_missing_options_are_named() -> None:
    with pytest.raises(UnknownOption, match="nmes: no such option; did you mean names"):
        make(nmes=())
    with pytest.raises(OptionError, match="size: is required"):
        build(Settings, {})


def test_a_former_value_is_replaced_with_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert make(kind="old").kind == "new"
    assert caplog.messages == ["kind: old is deprecated; use new"]


@pytest.mark.parametrize("value", ["7", 7.5, True])
def test_python_callers_must_use_the_right_type(value: object) -> None:
    with pytest.raises(OptionError, match="size: must be"):
        build(Settings, {"size": value}, strict=True)


class Planned(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    method: Literal["one", "two"]
    count: Annotated[int, Meta(ge=1)] = 3


class Planning(Struct, frozen=True):
    plan: Annotated[Planned | None, "A plan.", Meta(extra={"name": "plan_config"})] = None


@pytest.mark.parametrize(
    "value", ['{"method": "two", "count": 5}', {"method": "two", "count": 5}, Planned("two", 5)], ids=type
)
def test_a_struct_is_written_as_json_as_a_table_or_as_itself(value: object) -> None:
    assert build(Planning, {"plan_config": value}, strict=True) == Planning(Planned("two", 5))
    option = options_of(Planning)["plan_config"]
    assert option.text_of(option.parse(value)) == '{"method":"two","count":5}'
    assert build(Planning, {"plan_config": "none"}).plan is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"methd": "one"}', "unknown field `methd`; expected a JSON object with keys among method, count"),
        ('{"method": "three"}', "'three' - at `$.method`"),
        ('{"method": "one", "count": 0}', "`int` >= 1 - at `$.count`"),
        ("{method: one}", "malformed"),
        ("[" * 100_000, "expected a JSON object"),
        ([1], "got `array`"),
    ],
)
def test_a_wrong_key_of_a_struct_is_named(value: object, message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)) as caught:
        build(Planning, {"plan_config": value})
    assert caught.value.name == "plan_config"


def test_bounds_are_written_alike_whatever_was_imported_before() -> None:
    class Bounded(Struct, frozen=True):
        first: Annotated[Annotated[float, Meta(gt=-1.0, le=0.5)], "A share."] = 0.0

    assert options_of(Bounded())["first"].bounds == ("> -1", "≤ 0.5")
