"""Hold the tables behind the demo model's questions and answers."""

SHE = """Ann Cara Ella Grace Iris Kate Mia Olga Rosa Tara Uma Wendy Yara Zoe Alice Clara Emma Hannah Julia Lena Maria
Nina Priya Sofia Vera Bella Eva Fatima Helen Ines Lucy Nora""".split()
HE = """Ben Dan Finn Hugo Jack Leo Noah Paul Sam Victor Bruno David Felix Ivan Karim Oscar Quinn Ravi Tom Will Amir Chen
Diego George Jonas Kenji Max Omar""".split()
NAMES = SHE + HE
NEW_NAMES = "Peter Laura Simon Gita Marco Elsa Robin Tessa Adam Freya Luis Wanda".split()
"""Names that only the held-out questions use."""
CITIES = """Paris London Berlin Madrid Rome Oslo Vienna Cairo Delhi Tokyo Lima Quito Dublin Lisbon Athens Prague Warsaw
Seoul Sydney Toronto Boston Chicago Nairobi Lagos Accra Geneva Munich Milan Osaka Dallas Bern Riga""".split()
NEW_CITIES = "Havana Denver Porto Kyoto Turin Ottawa Bergen Malmo".split()
"""Cities that only the held-out questions use."""
COLOURS = "red blue green yellow white black brown purple orange pink grey".split()
LANGUAGES = "French German Spanish Italian Hindi Greek Polish Swahili".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
OPPOSITES = [
    pair.split()
    for pair in """hot cold|big small|up down|day night|happy sad|fast slow|open closed|light dark|old young|wet dry
|high low|loud quiet|full empty|hard soft|near far|early late|long short|rich poor|clean dirty|left right|in out
|good bad|strong weak|thick thin|first last|inside outside|tall short|black white|win lose|give take""".split("|")
]
COLOUR_OF = {
    "sky": "blue", "grass": "green", "snow": "white", "sun": "yellow", "coal": "black", "milk": "white",
    "strawberry": "red", "banana": "yellow", "leaf": "green", "carrot": "orange", "pig": "pink", "elephant": "grey",
    "chocolate": "brown", "tomato": "red", "sea": "blue", "plum": "purple", "lemon": "yellow", "night": "black",
    "frog": "green", "cloud": "white",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Norway": "Oslo", "Austria": "Vienna",
    "Egypt": "Cairo", "Japan": "Tokyo", "Peru": "Lima", "Ireland": "Dublin", "Portugal": "Lisbon", "Greece": "Athens",
    "Poland": "Warsaw", "Kenya": "Nairobi", "Ghana": "Accra", "Latvia": "Riga",
}  # fmt: skip
GLOSSARY = {
    "prefill": "Prefill is the first step of a request: the model reads the whole "
    "prompt at once and fills the KV cache.",
    "decode": "Decode is the step that makes the answer, one token at a time, reading the KV cache at every step.",
    "a KV block": "A KV block is a fixed number of slots that hold the keys and values of a few tokens. "
    "A request owns a list of blocks.",
    "the KV cache": "The KV cache keeps the keys and values of past tokens, so that they are not computed again.",
    "a token": "A token is a small piece of text, such as a word or a part of a word. "
    "The model reads and writes tokens.",
    "a tokenizer": "A tokenizer cuts text into tokens and gives each one a number. It "
    "also turns numbers back into text.",
    "a prompt": "A prompt is the text that you send to the model before it answers.",
    "a batch": "A batch is a group of requests that go through the model together in one step.",
    "continuous batching": "Continuous batching lets new requests join the batch and done "
    "requests leave it at any step.",
    "prefix caching": "Prefix caching keeps the KV blocks of a prompt, so that a later prompt with the same start "
    "can skip that work.",
    "the scheduler": "The scheduler decides which requests run in the next step and how many tokens each one gets.",
    "streaming": "Streaming sends each piece of the answer as soon as it is made, instead of waiting for the end.",
    "temperature": "Temperature sets how bold the sampling is. At zero the model always takes the most likely token.",
    "greedy decoding": "Greedy decoding always picks the most likely next token, so the same prompt gives the same "
    "answer.",
    "top-p sampling": "Top-p sampling picks among the most likely tokens whose chances add up to p.",
    "a chat template": "A chat template turns a list of messages into one text, with marks that show who is speaking.",
    "a tool call": "A tool call is an answer in which the model names a function and its "
    "arguments instead of plain text.",
    "attention": "Attention is the part of the model in which each token looks back at the tokens before it.",
    "the context length": "The context length is the largest number of tokens that the model can read in one request.",
    "throughput": "Throughput is the number of tokens that the server makes in one second for all requests together.",
    "latency": "Latency is the time that one request has to wait, such as the time until its first token.",
    "chunked prefill": "Chunked prefill cuts a long prompt into parts, so that other requests can decode in between.",
    "an embedding": "An embedding is a list of numbers that stands for a token inside the model.",
    "an engine": "An engine runs the model: it schedules the requests, computes their tokens and keeps the KV cache.",
    "a gateway": "A gateway takes the requests of the clients, checks them and streams the answers back.",
    "Tokenloom": "Tokenloom is an open-source server for language models. I am the small model it ships for demos.",
}
UNKNOWN = (
    "how do I fix my [car|bike|roof|phone]",
    "who won the [game|race|election|prize] [yesterday|last year|in 1998]",
    "what is the price of [gold|bread|a house|a ticket] today",
    "write a [poem in French|C program|letter to my bank]",
    "explain [quantum physics|the stock market|how planes fly|world history]",
    "what should I [cook|wear|buy|read] [today|tonight]",
    "how [old|tall|rich] is the [king|president|mayor]",
    "translate this page into [German|Hindi|Greek]",
    "what is the meaning of life",
    "how many people live in [China|Brazil|Texas]",
    "can you [drive|dance|see me|send an email]",
)
"""Questions that the model is to decline."""
