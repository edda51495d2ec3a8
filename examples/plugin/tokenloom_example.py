"""One small plugin of each kind for Tokenloom."""

import json


class Chorus:
    """Lets every n-th token of an output be a given one: {"chorus_token_id": 5, "chorus_every": 4}."""

    arguments = {
        "type": "object",
        "properties": {
            "chorus_token_id": {"type": "integer", "minimum": 0},
            "chorus_every": {"type": "integer", "minimum": 2, "maximum": 64},
        },
        "required": ["chorus_token_id", "chorus_every"],
    }

    def apply(self, logits, rows):
        """Change float32 logits [n, vocab] in place, by the tokens and arguments of each row alone."""
        for logit, row in zip(logits, rows, strict=True):
            if (len(row.output_token_ids) + 1) % row.arguments["chorus_every"] == 0:
                wanted = logit[row.arguments["chorus_token_id"]]
                logit[:] = float("-inf")
                logit[row.arguments["chorus_token_id"]] = wanted


def shortest_first(request):
    """Rank a request by its tokens: those with few begin first."""
    return request.num_prompt_tokens + request.max_output_tokens


def fewest(offers):
    """Return what a request costs on each engine: the requests that are there."""
    return offers.waiting + offers.running


class Totals:
    """Adds up the seconds in which an engine had work."""

    def __init__(self):
        self.seconds = 0.0

    def log(self, stats):
        """Take the statistics of an interval."""
        self.seconds += 0.0 if stats.is_idle else stats.seconds


def greet(name: str = "world"):
    """Greet somebody."""
    print(f"Hello, {name}.")


# How a family of models writes calls and reasoning, as data.
SQUARE = {"call": ["[call]", "[/call]"], "before_name": '{"name": "', "after_name": '", "arguments": ',
          "after_arguments": "}"}  # fmt: skip
ASIDE = {"start": "<aside>", "end": "</aside>", "begins_inside": False}


# What follows takes the place of a part of the engine. Here each is what is built in, which is imported only there.
def in_process(config, make_worker, worker_command):
    """Return what runs the workers of an engine: one, in the core's process."""
    from tokenloom.engine_core.executor.uniproc import UniProcExecutor

    return UniProcExecutor(make_worker(config))


def host(config):
    """Return the device on which the model computes: the CPU."""
    from tokenloom.gpu_worker.platform.platform import CPUPlatform

    return CPUPlatform()


class Npz:
    """Holds the tensors of a checkpoint whose directory has them in ``weights.npz``, NumPy's format."""

    described_by, views = "config.json", ()

    def __init__(self, path):
        import numpy

        self._arrays = numpy.load(path / "weights.npz", allow_pickle=False)
        self.names = self._arrays.files

    def read(self, name, shape):
        """Return a tensor on the CPU as it is stored."""
        import torch

        return torch.from_numpy(self._arrays[name])

    def close(self):
        """Close the file."""
        self._arrays.close()


def plain(model, block_size, device):
    """Return what computes attention: PyTorch's operations."""
    from tokenloom.gpu_worker.attention.torch_backend import TorchBackend

    return TorchBackend(model, block_size, device)


def memory():
    """Return what reads KV blocks of another engine: memory that both map."""
    from tokenloom.gpu_worker.kv_connector.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()


SHELF = {}


class Shelf:
    """Keeps KV blocks of all engines of this process in its memory, as values by keys of 32 bytes."""

    label = "shelf"

    def find(self, keys, *, in_order):
        """Return the keys that have values."""
        return SHELF.keys() & set(keys)

    def read(self, keys, nbytes):
        """Yield the value of each key; None: it has none."""
        yield from map(SHELF.get, keys)

    def write(self, key, parts):
        """Store a value, unless there is one or the shelf is full. Returns whether it did."""
        if key in SHELF or len(SHELF) >= 1000:
            return False
        SHELF[key] = b"".join(parts)
        return True

    def remove(self, key):
        """Remove a value that is wrong."""
        SHELF.pop(key, None)

    def close(self):
        """Leave the values where they are."""


def shelf(config):
    """Return what saves the engine's KV blocks when they are computed, and loads them where a prompt begins alike."""
    from tokenloom.engine_core.kv_transfer.store_connector import StoreConnector

    return StoreConnector(config.cache, Shelf, Shelf.label, timeout=1.0, load_timeout=30.0)


def lark(*arguments, **options):
    """Return what makes outputs follow a grammar: llguidance."""
    from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(*arguments, **options)


def tenant_of(key):
    """Return the name of the tenant of an API key such as ``team-a.x1y2``; None: it is nobody's."""
    team, _, secret = key.partition(".")
    return team if team.startswith("team-") and secret == "x1y2" else None


def tgi(gateway):
    """Offer /generate as text-generation-inference has it, by the gateway's own /v1/completions."""
    from tokenloom.request.errors import InvalidArgument

    async def generate(exchange):
        with await exchange.read_body(1 << 20) as received:
            asked = json.loads(received.data)
        if not isinstance(asked, dict) or not isinstance(asked.get("inputs"), str):
            raise InvalidArgument("inputs must be a text", "inputs")
        body = {"prompt": asked["inputs"], "max_tokens": asked.get("max_new_tokens", 20)}
        with exchange.until_disconnected():
            done = await gateway.calls.post("/v1/completions", json.dumps(body).encode(), exchange.tenant)
        if done.status == 200:
            done.body = json.dumps({"generated_text": json.loads(done.body)["choices"][0]["text"]}).encode()
        await exchange.respond(done.status, done.body)

    return {("POST", "/generate"): generate}


# A class of models that Qwen3's layers compute, whose files have other names for some entries and tensors.
BIRCH = {
    "like": "Qwen3ForCausalLM",
    "entries": {"width": "hidden_size", "depth": "num_hidden_layers"},
    "defaults": {"attention_bias": False},
    "tensors": {"trunk.": "model.", ".attention.": ".self_attn."},
}

SHOUT = "{% for message in messages %}{{ message.content | upper }}\n{% endfor %}"
