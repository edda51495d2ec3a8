"""Small forms of the attacks; ``make attack`` runs them in full, and judges times too."""

from collections.abc import Iterator
from functools import partial

import pytest

from tests.attack import bodies, browsers, images, shares, sounds, tenants, trailers, validators, videos
from tests.attack.attack import MIB, Attack, run_attack
from tests.attack.canary import Canary, running_canary
from tests.attack.target import Setup, Target, attacked

CANARY_TOKENS = 10
ATTACKS = [
    Attack("trailer-fields", partial(trailers.trailer_fields_with_key, total=4 * MIB), max_growth=5),
    Attack("trailer-value", partial(trailers.trailer_value_with_key, total=4 * MIB), max_growth=5),
    Attack("trailer-without-key", partial(trailers.trailer_fields, total=4 * MIB), max_growth=5),
    Attack("head-bytes", trailers.big_head),
    Attack("head-fields", trailers.many_fields),
    Attack("quadratic-string", partial(validators.quadratic_string, sizes=(64 << 10,))),
    Attack("cached-tokens", tenants.usage),
    Attack("content-types", browsers.content_types),
    Attack("idle-sessions", partial(shares.idle_sessions, num=300, probes=1)),
    Attack("logit-bias", partial(bodies.send_at_once, body=partial(bodies.logit_bias, 100_000), num=2)),
    Attack("stops", partial(bodies.send_at_once, body=partial(bodies.stops, 200_000), num=2)),
    Attack(
        "messages",
        partial(
            bodies.send_at_once, body=partial(bodies.empty_objects, "messages", MIB), path="/v1/chat/completions", num=2
        ),
    ),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[tuple[Target, Canary]]:
    with attacked(Setup()) as target, running_canary(target, CANARY_TOKENS) as canary:
        yield target, canary


def test_images_disturb_no_other_key() -> None:
    with attacked(images.SETUP) as target, running_canary(target, CANARY_TOKENS) as canary:
        names = ("16-bit", "animated-gif", "bomb", "narrow", "cut", "svg", "html-then-png", "eps")
        for attack in (
            Attack("image-files", partial(images.files, names=names, at_once=2)),
            Attack("image-urls", images.private_urls),
            Attack("image-many", partial(images.many_images, num=500)),
        ):
            assert run_attack(attack, target, canary).outcome.wrong == [], attack.name


def test_sounds_disturb_no_other_key() -> None:
    with attacked(sounds.SETUP) as target, running_canary(target, CANARY_TOKENS) as canary:
        names = (
            "wav-then-zip",
            "video",
            "bomb",
            "cut",
            "playlist",
            "list",
            "elsewhere-alias",
            "noise-webm",
            "many-samples",
        )
        for attack in (
            Attack("sound-files", partial(sounds.files, names=names, at_once=2)),
            Attack("sound-many", partial(sounds.many_sounds, num=300)),
        ):
            assert run_attack(attack, target, canary).outcome.wrong == [], attack.name


def test_videos_disturb_no_other_key() -> None:
    with attacked(videos.SETUP) as target, running_canary(target, CANARY_TOKENS) as canary:
        names = (
            "mp4-then-zip",
            "pictures",
            "long",
            "bomb",
            "commas",
            "cut-index",
            "playlist",
            "elsewhere-alias",
            "noise-webm",
            "many-samples",
            "huge-frames",
        )
        for attack in (
            Attack("video-files", partial(videos.files, names=names, at_once=2)),
            Attack("video-many", videos.many_videos),
        ):
            assert run_attack(attack, target, canary).outcome.wrong == [], attack.name


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_disturbs_no_other_key(mesh: tuple[Target, Canary], attack: Attack) -> None:
    assert run_attack(attack, *mesh).outcome.wrong == []
