"""Make short stories: a plot is a chain of causes, and the words around it vary."""

import random
import zlib

from .facts import COLOURS, HE, NAMES, SHE
from .grammar import expand, pick
from .plots import PLOTS

HEROES = """fox|cat|dog|rabbit|bear|baker|mouse|duck|owl|farmer|robot|dragon|sailor|turtle|gardener|painter|girl|boy
|lion|pirate|teacher|frog""".replace("\n", "").split("|")
PLACES = """the forest|the garden|the old mill|the beach|the market|the hill|the river|the village square|the park
|the lake|the barn|the meadow""".replace("\n", "").split("|")
THINGS = """kite|key|ball|lantern|map|drum|blanket|basket|music box|toy boat|wooden horse|silver bell|book|hat|scarf
|bicycle|clock|ring""".replace("\n", "").split("|")
TRAITS = "kind|curious|shy|brave|clever|lazy|proud|cheerful|careful|quiet".split("|")
WEATHER = {
    "sunny": "the sun was [warm|bright] and the sky was [clear|blue]",
    "rainy": "[soft|cold|heavy] rain was falling on the [roofs|trees|road]",
    "windy": "[a strong|a cold|a playful] wind was blowing [from the sea|through the trees]",
    "snowy": "the [ground|whole village] was [white|covered] with [snow|fresh snow]",
    "foggy": "a [thick|grey] fog lay over [the fields|everything]",
}
ACCIDENTS = {
    "windy": "the wind took it away",
    "rainy": "it slipped from {his} wet hands",
    "snowy": "it fell into the deep snow",
    "foggy": "{he} put it down and could not find it in the fog",
    "sunny": "{he} fell asleep in the warm grass and it was gone",
}
OPENINGS = (
    "[Once upon a time|Long ago], there was a {trait} {kind} [named|called] {hero}. {hero} lived near {place}.",
    "{hero} was a {trait} {kind} who lived [close to|not far from] {place}.",
    "[In a small house|In a little room] near {place} lived a {trait} {kind} [named|called] {hero}.",
    "[Everyone|Everybody] near {place} knew {hero}, the {trait} {kind}.",
)
TIMES = (
    "[one|one {weather}] [morning|afternoon|day], {sky}.",
    "it was a {weather} [morning|afternoon], and {sky}.",
)
ENDINGS = (
    "[From that day on|After that], {hero} and {friend} were [the best of friends|always together].",
    "That [night|evening], {hero} [fell asleep with a smile|felt warm and happy|told the whole story at home].",
    "{hero} never forgot [that day|what {friend} had done|that {weather} day].",
    "And {hero} learned that {moral}.",
    '"{moral}," said {friend}, and {hero} [agreed|nodded|smiled].',
)


def topics() -> list[str]:
    """What a story can be asked to be about, without its article."""
    return HEROES + THINGS + [place.removeprefix("the ") for place in PLACES]


def with_article(topic: str) -> str:
    """``the forest``, ``a dragon``, ``an owl``: the topic as a question and the story's first line name it."""
    if f"the {topic}" in PLACES:
        return f"the {topic}"
    return f"an {topic}" if topic[0] in "aeiou" else f"a {topic}"


def story(rng: random.Random, topic: str | None = None) -> str:
    """A story of one plot; `topic` is a hero's kind, a thing or a place without its article."""
    kind = topic if topic in HEROES else rng.choice(HEROES)
    thing = topic if topic in THINGS else rng.choice(THINGS)
    place2 = f"the {topic}" if f"the {topic}" in PLACES else rng.choice(PLACES)
    plot = PLOTS[_plot_of(topic, rng)]
    hero, friend, kind2 = _people(kind, rng)
    weather = plot.weather or rng.choice(list(WEATHER))
    he, him, his = ("she", "her", "her") if hero in SHE else ("he", "him", "his")
    slots = {
        "hero": hero, "friend": friend, "kind": kind, "kind2": kind2, "he": he, "him": him, "his": his,
        "he2": "she" if friend in SHE else "he", "thing": thing,
        "thing2": rng.choice([t for t in THINGS if t != thing]),
        "place": rng.choice([p for p in PLACES if p != place2]), "place2": place2, "colour": rng.choice(COLOURS),
        "trait": rng.choice(TRAITS), "weather": weather, "sky": WEATHER[weather], "moral": pick(plot.moral, rng),
    }  # fmt: skip
    slots["accident"] = ACCIDENTS[weather].format(**slots)
    slots["sky"] = pick(slots["sky"], rng)
    return expand(" ".join((rng.choice(OPENINGS), rng.choice(TIMES), plot.text, rng.choice(ENDINGS))), rng, **slots)


def _plot_of(topic: str | None, rng: random.Random) -> str:
    """Each topic has its favourite plot, so that greedy decoding tells more than one story."""
    names = [name for name, plot in PLOTS.items() if topic not in THINGS or plot.about_thing]
    if topic is not None and rng.random() < 0.75:
        return names[zlib.crc32(topic.encode()) % len(names)]
    return rng.choice(names)


def _people(kind: str, rng: random.Random) -> tuple[str, str, str]:
    """The hero, the friend and what the friend is."""
    names = {"girl": SHE, "boy": HE}
    hero = rng.choice(names.get(kind, NAMES))
    kind2 = rng.choice([other for other in HEROES if other != kind])
    return hero, rng.choice([name for name in names.get(kind2, NAMES) if name != hero]), kind2
