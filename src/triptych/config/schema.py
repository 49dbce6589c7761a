"""The deploy config as one frozen value. `load` reads it, `resolve` fills what depends on machine and checkpoint."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

StageKind = Literal["thinker", "talker", "code2wav"]
ConnectorKind = Literal["inproc", "shm"]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "fp8"]
SchedulingPolicy = Literal["slack", "fcfs"]


class ConnectorExtra(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knobs of one connector.

    `window` is how many handoffs of one request may be on their way before that request is parked. `inline_bytes` is
    the largest payload that rides inside the control message. `put_timeout_s` ends a request whose consumer stalls.
    The two chunk sizes are the cadence of Code2Wav, in codec frames.
    """

    initial_codec_chunk_frames: int = 4
    codec_chunk_frames: int = 25
    window: int = 64
    inline_bytes: int = 65536
    put_timeout_s: float = 60.0


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: ConnectorKind = "shm"
    extra: ConnectorExtra = ConnectorExtra()


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may bring along, and what may be spent on it. What exceeds a limit is refused by the limit's name.

    Sizes of files count as they are sent, pixels and seconds as they are decoded.
    """

    workers: int = 1  # processes that decode
    worker_memory_bytes: int = 4 * 1024**3  # address space of one
    decode_timeout_s: float = 60.0  # for one part
    max_waiting: int = 64  # parts that wait for a worker; more get 503
    max_parts: int = 64  # of one request
    max_bytes: int = 256 * 1024**2  # of one file
    max_body_bytes: int = 64 * 1024**2  # of a request, with what it carries inside
    fetch: bool = True  # whether URLs are fetched at all
    fetch_timeout_s: float = 20.0
    max_redirects: int = 3
    allow_http: bool = False  # plain http: URLs
    allow_private_addresses: bool = False
    allowed_domains: tuple[str, ...] = ()  # empty: every public one; "example.com" stands for its subdomains as well
    local_path: str = ""  # files below this folder may be named; "": none
    max_image_pixels: int = 100_000_000
    min_audio_s: float = 0.05
    max_audio_s: float = 2400.0
    max_video_s: float = 3600.0
    max_video_pixels: int = 33_177_600  # of one frame as it is stored
    max_frames: int = 768  # sampled of one video
    cache_bytes: int = 256 * 1024**2  # decoded media kept for the next request that brings the same


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of steps, one file for each replica of each stage. Nothing is recorded where `dir` is empty."""

    dir: str = ""
    skip_steps: int = 8  # at the start, those of the warm-up request among them
    max_steps: int = 16


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage. Stages that name the same `process` share one OS process and are stepped in turn.

    With `num_replicas` above 1 the process is started so many times, as "name:0", "name:1" and so on.
    """

    stage_id: int
    stage: StageKind
    process: str
    devices: str = "auto"  # "cpu", "cuda", "cuda:1", or "0" as users of CUDA_VISIBLE_DEVICES write it; "1,2": replicas
    num_replicas: int = 1
    dtype: DTypeName = "auto"
    quantization: Literal["int8", "fp8", None] = None  # of the projections in the layers of Thinker and Talker
    threads: int = 1  # intra-op threads of the process on CPU; the largest of its stages counts
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 0  # 0: what the checkpoint allows
    block_size: int = 16
    num_kv_blocks: int = 0  # 0: from kv_cache_bytes (CPU) or gpu_memory_utilization (CUDA)
    kv_cache_bytes: int = 268435456
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = True  # False: compiled code on a CPU, recorded graphs on CUDA
    enable_prefix_caching: bool = False
    batch_invariant: bool = True
    encoder_budget: int = 4096  # patches, or frames of spectrogram, that one turn of the Thinker encodes
    encoder_cache_bytes: int = 268435456  # encoded media kept for the next request that brings the same
    frames_per_text_token: int = 12  # watchdog: frames > this x text tokens + extra_frames end the speech
    extra_frames: int = 50
    scheduling_policy: SchedulingPolicy = "slack"  # speech: who runs out of audio first, or first come, first served
    input_connectors: dict[str, str] = {}  # {"thinker": "shm"}: source stage -> connector name
    default_sampling_params: dict[str, Any] = {}

    def replica(self, index: int) -> StageConfig:
        """The stage as its replica sees it: one of one, with the process and the device that are its own."""
        return msgspec.structs.replace(
            self,
            process=_numbered(self.process, index, self.num_replicas),
            devices=self.devices.split(",")[index],
            num_replicas=1,
        )


class DeployConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment, resolved. What a deploy file may also say (`base_config`, `platforms`) is gone by then."""

    stages: tuple[StageConfig, ...]
    connectors: dict[str, ConnectorConfig] = {}
    async_chunk: bool = True
    max_queued_requests: int = 256  # beyond max_num_seqs of stage 0; more get 429
    request_timeout_s: float = 600.0
    stage_init_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 30.0
    max_stage_restarts: int = 5
    audio_id_lifetime_s: int = 3600
    media: MediaConfig = MediaConfig()
    profile: ProfileConfig = ProfileConfig()

    def stage(self, kind: StageKind) -> StageConfig | None:
        """The stage of that kind, or None where the deployment has none."""
        return next((stage for stage in self.stages if stage.stage == kind), None)

    def replicas(self, kind: StageKind) -> dict[str, StageConfig]:
        """The replicas of a stage by name and in order, see `StageConfig.replica`; none where there is no such stage.

        The name is the stage's own where there is one replica, else "talker:0", "talker:1" and so on.
        """
        stage = self.stage(kind)
        count = stage.num_replicas if stage is not None else 0
        return {_numbered(kind, index, count): stage.replica(index) for index in range(count) if stage is not None}

    @property
    def processes(self) -> dict[str, tuple[StageConfig, ...]]:
        """Process name -> the replicas that live in it, in stage order."""
        replicas = [replica for stage in self.stages for replica in self.replicas(stage.stage).values()]
        names = dict.fromkeys(replica.process for replica in replicas)
        return {name: tuple(replica for replica in replicas if replica.process == name) for name in names}


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}:{index}"  # no process that a deploy file may name has a colon
