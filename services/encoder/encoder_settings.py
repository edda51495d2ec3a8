"""Options of an encoder."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from tokenloom.services.runtime.host.service_settings import OptionalAddress, ServiceSettings

_Workers = Annotated[int, Meta(ge=1, le=64)]
_Seconds = Annotated[float, Meta(gt=0, le=3600)]
_Bytes = Annotated[int, Meta(ge=1 << 20)]


class EncoderSettings(ServiceSettings, frozen=True, kw_only=True):
    """Which model's tower to compute, and the resources that it may use."""

    service: ClassVar[str] = "encoder"

    model: Annotated[str, "Checkpoint directory or hub id of a model that reads images or sound."] = ""
    served_model_name: Annotated[str, "Name that clients use; by default the last part of the directory."] = ""
    coordinator: Annotated[OptionalAddress, "Address of the coordinator; empty: none is joined."] = ""
    advertise_address: Annotated[OptionalAddress, "Address for peers if it differs from --listen."] = ""
    device: Annotated[str, "Where the tower is computed: cpu, cuda or cuda:N; auto: on a GPU if one is available."] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "Numbers of the tower; auto: those of the checkpoint, on a CPU bfloat16 if float16.",
    ] = "auto"
    tower_quantization: Annotated[
        Literal["int8-dynamic", "int4"] | None,
        "How the linear layers of the tower are rounded on a CPU, as --quantization of engines does; all encoders of a "
        "model need the same.",
    ] = None
    tower_graphs: Annotated[
        bool, "On a GPU, compute images of a size that has come before from a captured graph; up to 16 sizes."
    ] = False
    image_workers: Annotated[
        _Workers,
        "Processes that decode images and prepare their pixels, or prepare pieces of sounds; as many decode videos.",
    ] = 2
    image_timeout: Annotated[_Seconds, "Seconds of processor time that one image, or one piece, may take there."] = 20.0
    video_timeout: Annotated[
        _Seconds, "Seconds of processor time that one video may take there, up to the last frame that is shown."
    ] = 60.0
    sound_workers: Annotated[_Workers, "Processes that decode whole sounds."] = 2
    sound_timeout: Annotated[_Seconds, "Seconds of processor time that one sound may take there."] = 900.0
    tower_threads: Annotated[
        Annotated[int, Meta(ge=0, le=256)], "Threads of the tower on CPUs; 0: as torch sets it."
    ] = 0
    tower_timeout: Annotated[_Seconds, "Seconds that the tower may take for one image or piece."] = 300.0
    tower_batch: Annotated[
        Annotated[int, Meta(ge=0, le=64)],
        "Pieces of sounds, or images of one size, that the tower computes at once; 0: one, of sounds on a GPU 8.",
    ] = 0
    max_image_bytes: Annotated[_Bytes, "Largest file of an image, in bytes."] = 20 << 20
    max_image_pixels: Annotated[
        Annotated[int, Meta(ge=1)], "Pixels of the largest image, and of the largest frame, that is decoded."
    ] = 64 << 20
    max_video_bytes: Annotated[_Bytes, "Largest file of a video, in bytes."] = 64 << 20
    max_video_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=86400)], "Seconds of the longest video of which frames are shown."
    ] = 600.0
    max_sound_bytes: Annotated[Annotated[int, Meta(ge=1)], "Largest file of a sound, in bytes."] = 1 << 30
    max_sound_seconds: Annotated[
        Annotated[float, Meta(gt=0, le=86400)], "Seconds of the longest sound that is decoded."
    ] = 86400.0
    media_files_bytes: Annotated[
        _Bytes,
        "Memory for files of images and videos, in bytes. Those of live requests stay, others as long as they fit.",
    ] = 512 << 20
    sound_disk_bytes: Annotated[
        _Bytes, "Disk for sounds, in bytes: files as they arrive, and samples, of which an hour takes 230 MB."
    ] = 8 << 30
    sound_folder: Annotated[
        str, "Folder on the disk for sounds; empty: that of the system for temporary files. Its files have no names."
    ] = ""
    media_rows_bytes: Annotated[_Bytes, "Memory for rows that were computed, in bytes."] = 1 << 30
    media_lease: Annotated[
        _Seconds, "Seconds for which a file stays for a request that never says that it has ended."
    ] = 180.0
    allowed_media_domains: Annotated[
        tuple[str, ...],
        "Hosts from which files are fetched: names, or *.name for all below one. Empty: requests carry their files.",
    ] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tower_graphs and self.device.startswith("cpu"):
            raise ValueError(f"--tower-graphs: graphs of a tower are those of a GPU; leave it out on {self.device}")
        if self.tower_quantization is None:
            return
        if self.device.startswith("cuda"):
            raise ValueError(f"--tower-quantization: towers are rounded on CPUs only; leave it out on {self.device}")
        if self.dtype == "float16":
            raise ValueError("--tower-quantization: rounded towers compute in bfloat16 or float32; set another --dtype")
