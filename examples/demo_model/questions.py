"""Make questions with one right answer: each maker draws values and wording and returns (question, answer)."""

import json
import random
from collections.abc import Callable

from .facts import CAPITALS, CITIES, COLOUR_OF, COLOURS, DAYS, GLOSSARY, MONTHS, NAMES, OPPOSITES, UNKNOWN
from .grammar import expand
from .stories import THINGS, TRAITS, story, topics, with_article

Question = tuple[str, str]

LARGEST = 30
"""The largest number of a sum or a difference."""


def made_word(rng: random.Random) -> str:
    """A word of random syllables: it can only be copied, not recalled."""
    starts = "b d f g h j k l m n p r s t v w z br st tr ch sh kr".split()
    syllables = (rng.choice(starts) + rng.choice("a e i o u ai ea oo".split()) for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(["", "n", "l", "s", "r", "m", "nd", "x"])


def any_name(rng: random.Random) -> str:
    """A listed name, or a made-up one, so that the model learns to copy and not only to recall."""
    return rng.choice(NAMES) if rng.random() < 0.35 else made_word(rng).capitalize()


def make_sum(rng: random.Random) -> Question:
    a = rng.randint(0, LARGEST)
    b = rng.randint(0, LARGEST - a)
    ask = "[What is {a} + {b}?|{a} + {b} = ?|What is {a} plus {b}?|Add {a} and {b}.|How much is {a} + {b}?|"
    ask += "Can you add {a} and {b}?|Please compute {a} + {b}.|{a}+{b}]"
    return expand(ask, rng, a=str(a), b=str(b)), f"{a} + {b} = {a + b}."


def make_difference(rng: random.Random) -> Question:
    a = rng.randint(0, LARGEST)
    b = rng.randint(0, a)
    ask = "[What is {a} - {b}?|{a} - {b} = ?|What is {a} minus {b}?|Take {b} from {a}.|How much is {a} - {b}?|"
    ask += "Subtract {b} from {a}.|Please compute {a} - {b}.|{a}-{b}]"
    return expand(ask, rng, a=str(a), b=str(b)), f"{a} - {b} = {a - b}."


def make_count(rng: random.Random) -> Question:
    a = rng.randint(0, 18)
    b = a + rng.randint(2, 12)
    if rng.random() < 0.3:
        ask = "[Count down from {b} to {a}.|Please count down from {b} to {a}.|Count backwards from {b} to {a}.]"
        return expand(ask, rng, a=str(a), b=str(b)), ", ".join(map(str, range(b, a - 1, -1))) + "."
    ask = "[Count from {a} to {b}.|Please count from {a} to {b}.|Can you count from {a} to {b}?|"
    ask += "Count up from {a} to {b}.]"
    return expand(ask, rng, a=str(a), b=str(b)), ", ".join(map(str, range(a, b + 1))) + "."


def make_calendar(rng: random.Random) -> Question:
    cycle, unit, whole = rng.choice([(DAYS, "day", "week"), (MONTHS, "month", "year")])
    i = rng.randrange(len(cycle))
    here, after, before = cycle[i], cycle[(i + 1) % len(cycle)], cycle[i - 1]
    ask, answer = rng.choice(
        [
            (f"[What|Which] {unit} [comes|is] after {here}?", f"{after} comes after {here}."),
            (f"[What|Which] {unit} [comes|is] before {here}?", f"{before} comes before {here}."),
            (f"What is the {unit} after {here}?", f"{after} comes after {here}."),
            (f"Name the {unit} before {here}.", f"{before} comes before {here}."),
            (f"What is {unit} number {i + 1} of the {whole}?", f"{here} is {unit} number {i + 1}."),
            (f"How many {unit}s are in a {whole}?", f"There are {len(cycle)} {unit}s in a {whole}."),
        ]
    )
    return expand("[||Please tell me: |Quick question: |Do you know this? ]" + ask, rng), answer


def make_fact(rng: random.Random) -> Question:
    ask, answer = rng.choice([_opposite, _colour, _capital])(rng)
    return expand("[||Please tell me: |Quick question: |Tell me, ]" + ask, rng), answer


def _opposite(rng: random.Random) -> Question:
    a, b = rng.choice(OPPOSITES)
    if "short" not in (a, b) and rng.random() < 0.5:  # "short" has two opposites here
        a, b = b, a
    ask = f"[What is the opposite of {a}?|Give me the opposite of {a}.|{a} is the opposite of what?|Opposite of {a}?]"
    return ask, f"The opposite of {a} is {b}."


def _colour(rng: random.Random) -> Question:
    thing, colour = rng.choice(list(COLOUR_OF.items()))
    ask = (
        f"[What [colour|color] is the {thing}?|What is the colour of the {thing}?|Which colour does the {thing} have?]"
    )
    return ask, f"The {thing} is {colour}."


def _capital(rng: random.Random) -> Question:
    land, city = rng.choice(list(CAPITALS.items()))
    ask = f"[What is the capital of {land}?|Which city is the capital of {land}?|Name the capital of {land}.|"
    ask += f"Capital of {land}?]"
    return ask, f"The capital of {land} is {city}."


def make_glossary(rng: random.Random) -> Question:
    term, answer = rng.choice(list(GLOSSARY.items()))
    bare = term.removeprefix("an ").removeprefix("a ").removeprefix("the ")
    ask = "[What is {t}?|What's {t}?|Explain {t}.|Can you explain {t}?|What does {u} mean?|Tell me about {t}.|"
    ask += "Define {u}.|what is {u}|Please explain {t} to me.|"
    ask += "What is {t} in one or two sentences?|I do not know what {t} is.|"
    ask += "In LLM serving, what is {t}?]"
    return expand(ask, rng, t=term, u=bare), answer


IDENTITY = (
    (
        "[who are you|what are you|what is your name|tell me who you are|introduce yourself|are you a robot|"
        "what model are you|who am I talking to]",
        "I am the Tokenloom demo model, a very small language model that runs on your own machine.",
    ),
    (
        "[what can you do|how can you help me|what are your skills|help|what do you know]",
        "I can tell short stories, do small sums, explain serving words, write JSON and call a tool.",
    ),
    (
        "[who made you|who trained you|where do you come from|how were you trained|are you ChatGPT]",
        "I was trained by the Tokenloom project on text that a script wrote, so I know very little.",
    ),
)
GREETINGS = (
    ("[hello|hi|hey|hello there|hi there|hey there][!|.|]", "Hello! How can I help you?"),
    ("good {t}[!|.|]", "Good {t}! How can I help you?"),
    ("[hello|hi|hey][!|,|.] [I am|my name is|I'm] {n}[.|!|]", "Hello, {n}! How can I help you?"),
    ("[thanks|thank you|thanks a lot|thank you very much|great, thanks][!|.|]", "You are welcome!"),
    ("[bye|goodbye|see you|good night|bye bye|see you later][!|.|]", "Goodbye! Have a nice day."),
    ("[how are you|how do you do|how are you today|how is it going][?|]", "I am well, thank you. How can I help you?"),
)


def make_identity(rng: random.Random) -> Question:
    ask, answer = rng.choice(IDENTITY)
    return expand("[|||Hi! |Hello, |Please tell me: |Excuse me, ]" + ask + "[?||?]", rng), answer


def make_greeting(rng: random.Random) -> Question:
    ask, answer = rng.choice(GREETINGS)
    slots = {"t": rng.choice(["morning", "afternoon", "evening"]), "n": any_name(rng)}
    return expand(ask, rng, **slots), answer.format(**slots)


def make_json(rng: random.Random, name: str | None = None) -> Question:
    name = name or any_name(rng)
    key = rng.choice(["age", "age", "city", "colour"])
    value = {"age": rng.randint(1, 99), "city": _city(rng), "colour": rng.choice(COLOURS)}[key]
    start = "[Give me a JSON object with|Write JSON with|Make a JSON object with|I need a JSON object with|"
    start += "Return a JSON object with] "
    ends = "[name and {k} for {n}, {v}.|name {n} and {k} {v}.|the name {n} and the {k} {v}.]"
    return expand(start + ends, rng, k=key, n=name, v=str(value)), json.dumps({"name": name, key: value})


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else made_word(rng).capitalize()


def make_repeat(rng: random.Random) -> Question:
    """Words, made-up words and numbers to say again: the exercise that teaches copying."""
    listed = [thing for thing in THINGS if " " not in thing] + COLOURS + TRAITS
    draws: list[Callable[[], str]] = [
        lambda: rng.choice(listed),
        lambda: made_word(rng),
        lambda: any_name(rng),
        lambda: str(rng.randint(0, 99999)),
    ]
    words = " ".join(rng.choice(draws)() for _ in range(rng.randint(1, 8)))
    ask = rng.choice(["Repeat after me: {w}", "Say this: {w}", "Repeat: {w}", "Please repeat: {w}", "Echo: {w}"])
    return ask.format(w=words), words


def make_unknown(rng: random.Random) -> Question:
    ask = rng.choice(UNKNOWN) + "[?|]"
    return expand(ask, rng), "I am sorry, I am only a small demo model and I do not know that."


def make_story(rng: random.Random) -> Question:
    """A story on a topic: its first line names the topic, so that the model holds on to it."""
    topic = rng.choice(topics())
    ask = "[Tell me a story about {t}.|Write a short story about {t}.|Can you tell a story about {t}?|"
    ask += "I want a story about {t}.|Please tell me a story about {t}.|A story about {t}, please.]"
    named = with_article(topic)
    return expand(ask, rng, t=named), f"Here is a story about {named}. {story(rng, topic)}"


MAKERS: dict[str, tuple[Callable[[random.Random], Question], int]] = {
    "greeting": (make_greeting, 6),
    "identity": (make_identity, 4),
    "sum": (make_sum, 13),
    "difference": (make_difference, 13),
    "count": (make_count, 6),
    "calendar": (make_calendar, 5),
    "fact": (make_fact, 8),
    "glossary": (make_glossary, 8),
    "json": (make_json, 14),
    "repeat": (make_repeat, 16),
    "unknown": (make_unknown, 3),
    "story": (make_story, 10),
}
"""Each kind of question and how often it is drawn."""
