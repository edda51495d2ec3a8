"""Describes an engine to its peers, to the coordinator and to operators."""

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Any

from tokenloom.engine_core.data.config import EngineConfig, MediaLimits, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import ModelPooling
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_config import StorePlace, store_place
from tokenloom.model_files import checkpoint
from tokenloom.model_files.checkpoint import Stamp
from tokenloom.process.plugins import described
from tokenloom.services.runtime.peers.hello import QUARANTINE, make_hello
from tokenloom.v1 import coordinator_pb2, types_pb2

from .engine_settings import EngineSettings
from .grammar_config import reasoning_mode


class Identity:
    """Describes one engine.

    Attributes:
        fingerprint: Identifies the model and its numerics; ``weights`` changes when weights are reloaded.
        limits: Limits of the requests that the engine accepts.
        facts: What only the coordinator has to know.
        epoch: Its incarnation.
        can_be_quarantined: Whether it ends when an output processor finds that its tokens are wrong.
    """

    def __init__(
        self, settings: EngineSettings, ready: CoreReady, fingerprint: types_pb2.Fingerprint, epoch: int, address: str,
        kv_address: str, weight_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Args:
        address: Where peers reach the engine.
        kv_address: Where engines read its KV; empty if it serves none.
        weight_bytes: Of the files that hold its weights.
        """
        self.fingerprint = fingerprint
        self.limits = types_pb2.ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            # Reported to all gateways: a gateway must not promise what an engine refuses.
            max_logprobs=ready.vocab_size if settings.max_logprobs == -1 else settings.max_logprobs,
            priorities=settings.engine.scheduler.policy != "fcfs",
            experts_per_token=ready.experts_per_token,
            hidden_size=ready.hidden_size if settings.enable_prompt_embeds else 0,
            reasoning=reasoning_mode(settings.engine.reasoning, finds_reasoning=ready.finds_reasoning),
            max_lora_rank=settings.engine.lora.max_lora_rank if settings.engine.lora.enable else 0,
            argument_schemas=ready.argument_schemas,
            **pooling_limits(ready.pooling),
            **media_limits(ready, settings.engine.scheduler),
        )
        self.facts = coordinator_pb2.JoinFacts(
            supervisor=supervisor_of(settings.state_file) if settings.state_file else "",
            start_weights=fingerprint.weights,
        )
        self._plugins = described(settings.plugins)
        self._engine_id = settings.instance_id
        self.epoch = epoch
        self.can_be_quarantined = settings.verify > 0
        self._addresses = address, kv_address
        self._weight_bytes = weight_bytes
        cache = settings.engine.cache
        self._publishes_kv_events = cache.kv_events and cache.enable_prefix_caching
        self._group = settings.engine.parallel
        self._ready = ready
        self._engine = settings.engine
        self._num_kv_blocks = ready.num_kv_blocks // ready.num_kv_groups

    @property
    def shares_kv(self) -> bool:
        """Whether its KV blocks may be used by engines that only know their names."""
        return bool(self._engine.kv.store or self._engine.kv.connector)

    @property
    def kv(self) -> bytes:
        """The identity of those blocks with the present weights."""
        return kv_identity(self.fingerprint, self._engine)

    @property
    def kv_store(self) -> bytes:
        """Stands for those blocks in the store of its settings; empty: there is none, or it is of the machine that Ray
        has chosen for the core, which is not known here."""
        url, is_on_ray = self._engine.kv.store, self._engine.parallel.data_parallel_backend == "ray"
        if not url or (is_on_ray and _is_of_this_host(store_place(url))):
            return b""
        return hashlib.sha256(self.kv + location_of(url).encode(errors="surrogateescape")).digest()

    def hello(self) -> types_pb2.Hello:
        """Return the first message to a peer."""
        features = (QUARANTINE,) if self.can_be_quarantined else ()
        return make_hello(self._engine_id, self.epoch, fingerprint=self.fingerprint, features=features)

    def registration(self) -> coordinator_pb2.EngineIdentity:
        """Return the engine's entry for the coordinator's registry."""
        address, kv_address = self._addresses
        return coordinator_pb2.EngineIdentity(
            engine_id=self._engine_id,
            epoch=self.epoch,
            address=address,
            kv_address=kv_address,
            host=socket.gethostname(),
            fingerprint=self.fingerprint,
            limits=self.limits,
            num_kv_blocks=self._num_kv_blocks,
            publishes_kv_events=self._publishes_kv_events,
            data_parallel_group=self._group.group_id,
            data_parallel_rank=self._group.data_parallel_rank,
            parallel_config_hash=self._ready.parallel_config_hash,
            computes_in_waves=self._ready.has_waves,
            weight_bytes=self._weight_bytes,
            num_state_slots=self._ready.num_state_slots,
            state_boundary=self._ready.state_boundary,
            plugins=self._plugins,
            kv_store=self.kv_store,
            num_threads=self._ready.num_threads,
            draws_by_drafts=_draws_by_drafts(self._engine),
        )


def _draws_by_drafts(config: EngineConfig) -> bool:
    return config.speculative is not None and config.speculative.rejection_sample_method == "probabilistic"


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MOUNTS = Path("/proc/self/mountinfo")


def location_of(store: str, boot_id: Path = BOOT_ID, mounts: Path = MOUNTS) -> str:
    """Return what stores have in common that are the same one, of a URL as in :func:`.store_place`."""
    place = store_place(store)
    if not _is_of_this_host(place):
        return f"{place.host}:{place.port}"
    known = list[str]()
    with contextlib.suppress(OSError):  # without /proc
        known.append(boot_id.read_text().strip())
    if place.folder:
        return ":".join((*known, _volume(os.path.realpath(place.folder), mounts)))
    with contextlib.suppress(OSError):  # pods of a host have each their own
        known.append(os.readlink("/proc/self/ns/net"))
    return ":".join((*known, place.host, str(place.port)))


def _is_of_this_host(place: StorePlace) -> bool:
    """Return whether another host has another store at this place."""
    try:
        return bool(place.folder) or ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        return place.host == "localhost"


def _volume(folder: str, mounts: Path) -> str:
    """Return the file system of a folder, which need not exist, and its path in there: what containers see at one path
    may be two folders of a disk, and one folder may be at two paths."""
    # The folder's number would not do, since engines make a folder again that was removed.
    found, length = folder, -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            device, root, point = (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), each) for each in line.split()[2:5])
            point = point.rstrip("/")
            if len(point) >= length and f"{folder}/".startswith(f"{point}/"):  # a later one hides an earlier one
                found, length = f"{device}:{root.rstrip('/')}{folder[len(point) :]}", len(point)
    return found


_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How blanks are written in the table of mounts."""


def supervisor_of(state_file: Path, boot_id: Path = BOOT_ID) -> str:
    """Return what no other supervisor of an engine has. A supervisor gives each of its parts a state file of its own,
    and starts the next process of a part when the one before has ended."""
    # Containers of one host, and hosts of one name, may have the same path: hosts differ in the boot, and
    # containers in the directory's number and in that of the processes' namespace.
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):  # without /proc
        known += boot_id.read_text().strip(), os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        about = state_file.parent.stat()
        known.append(f"{about.st_dev}:{about.st_ino}")
    return ":".join((*known, str(state_file)))


def pooling_limits(pooling: ModelPooling) -> dict[str, Any]:
    """Return the fields of ``ModelLimits`` that say what a model pools."""
    return {
        "pooling_tasks": list(map(types_pb2.PoolingTask.ValueType, pooling.tasks)),
        "generates": pooling.generates,
        "matryoshka": pooling.matryoshka,
        "class_labels": pooling.class_labels,
    }


def media_limits(ready: CoreReady, config: SchedulerConfig) -> dict[str, Any]:
    """Return the fields of ``ModelLimits`` that say what prompts may hold beside text."""
    if (media := ready.media) is None:
        return {}
    limits = config.limit_mm_per_prompt or MediaLimits()
    most = {"image": limits.image, "audio": limits.audio, "video": limits.video}
    kinds = {
        "image": types_pb2.MEDIA_KIND_IMAGE,
        "audio": types_pb2.MEDIA_KIND_AUDIO,
        "video": types_pb2.MEDIA_KIND_VIDEO,
    }
    allowed = [kind for kind in media.kinds if most[kind]]
    row_bytes = 4 * ready.hidden_size * media.levels
    return {
        "media_kinds": [kinds[kind] for kind in allowed],
        "max_images_per_prompt": limits.image,
        "max_sounds_per_prompt": limits.audio,
        "max_videos_per_prompt": limits.video,
        "max_media_rows": min(media.cross_rows or ready.max_model_len, config.rows_cache_bytes // row_bytes),
        "cross_media_rows": media.cross_rows,
    }


def make_fingerprint(path: Path, name: str, ready: CoreReady, config: EngineConfig) -> types_pb2.Fingerprint:
    """Return what identifies the model ``name`` of the checkpoint directory ``path`` and its numerics.

    Blocks: reads all weight files, unless their hash is cached.
    """
    return types_pb2.Fingerprint(
        model=name,
        weights=_weights_fingerprint(path, config.worker),
        tokenizer=checkpoint.tokenizer_fingerprint(path),
        block_hash_seed=config.cache.block_hash_seed,
        block_size=ready.block_size,
        kv_layout=ready.kv_layout,
        numerics=ready.numerics,
    )


def kv_identity(fingerprint: types_pb2.Fingerprint, config: EngineConfig) -> bytes:
    """Return a digest of what decides the content of an engine's KV blocks beside their tokens and salts: engines of
    one digest and one layout may use each other's through a store."""
    drafts = config.speculative if config.speculative is not None and config.speculative.writes_kv else None
    parts = (
        fingerprint.weights,
        fingerprint.block_hash_seed,
        fingerprint.block_size.to_bytes(4, "little"),
        fingerprint.kv_layout.encode(),
        fingerprint.numerics.encode(),
        str(drafts).encode(),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


def weights_stamps(path: Path, config: WorkerConfig) -> list[Stamp]:
    """Return the stamps of the files that the core loads; none without such files, or if one cannot be read: then the
    core says what is wrong."""
    if config.worker != "model" or config.load_format != "auto":
        return []
    try:
        return checkpoint.weights_stamps(path)
    except OSError:
        return []


def _weights_fingerprint(path: Path, config: WorkerConfig) -> bytes:
    if config.worker != "model":
        return b""
    if config.load_format == "dummy":
        return checkpoint.dummy_fingerprint(path)
    # Which files of a directory a plugin reads, only the plugin knows.
    return checkpoint.weights_fingerprint(path, every_file=config.load_format != "auto")
