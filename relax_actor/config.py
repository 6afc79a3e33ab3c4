"""The configuration of a run: one record a section, each field with its unit, default and reason.

Sections are the tables of the TOML file and the prefixes of `section.key=value` on the command line.
Reading, overriding and checking them is `launcher.settings`' work; this module imports nothing heavy.
"""

import math
from typing import Literal

import msgspec


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this run is."""

    name: str = "run"
    mode: Literal["async_on_policy", "async_off_policy"] = "async_off_policy"
    max_staleness: int = 1
    """Policy versions a trained token may lag behind, queue time included; 0 is synchronous."""
    steps: int = 100
    seed: int = 0
    dir: str = "runs/{name}-{time}"
    """The run folder; `{name}` and `{time}` are filled in."""
    resume: str = "none"
    """`none`, `auto` (newest whole checkpoint of the run folder, if any), a step of it or a folder."""
    grace_s: float = 60.0
    """How long a stop may take before processes are killed."""
    colocate: bool = False
    """Trainer and rollouts of a host take turns in having GPU memory; needs `max_staleness` 0."""
    colocate_sleep_s: float = 60.0
    """How long a rollout may take to free its memory for the trainer, before it is killed."""
    user_path: str = ""
    """Folder of the user's own modules (rewards); goes to the END of sys.path of every actor."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy being trained."""

    path: str
    """A Hugging Face model folder: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What rollouts sample in and the trainer computes in; master weights are always float32."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where prompts come from."""

    path: str
    """JSONL, one row a line."""
    prompt_key: str = "prompt"
    label_key: str = "label"
    template: Literal["text", "chat"] = "text"
    """`text`: the prompt as it is; `chat`: one user turn, or a list of messages, in the chat template."""
    system_prompt: str = ""
    prefix_path: str = ""
    """A text file put before every prompt, such as few-shot examples."""
    shuffle: bool = True
    """Permute every epoch by the run's seed."""
    on_bad_row: Literal["error", "skip"] = "error"
    max_prompt_tokens: int = 0
    """Longer prompts are bad rows; 0 is the model's context less one token."""
    media_key: str = ""
    """Field of a row's images: an object of nested lists of numbers, named as the model takes them."""


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who samples, and how."""

    engine: Literal["transformers", "sglang", "scripted"] = "transformers"
    replicas: int = 1
    samples_per_prompt: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a sample, besides the model's own end tokens: it ends with the token that makes one
    whole. They are looked for in its text; that of a special token is the token."""
    stop_token_ids: tuple[int, ...] = ()
    max_in_flight: int = 64
    """Samples decoded at once in one replica."""
    device: str = "auto"
    """`auto` (a GPU where the host has some), `cpu`, `cuda` or `cuda:N`; replicas take the GPUs in turn."""
    deterministic: bool = False
    """Bit-identical samples on every replica, at the price of batching."""
    threads: int = 1
    lease_s: float = 300.0
    """A prompt comes back to the queue when its rollout has not finished it by then."""
    chunk_tokens: int = 0
    """Tokens after which an unfinished sample is put into the queue, for others to go on from; 0 is never."""
    min_replicas: int = 1
    """The run goes on while so many replicas have a host that is there; `scale` leaves as many."""
    max_replicas: int = 0
    """`scale` starts no more; 0: as many as have a place."""
    scripted_token_s: float = 0.0
    """Engine `scripted` only: how long it pretends a decode step takes."""
    tensor_parallel: int = 1
    """Engine `sglang` only, as all that follow: GPUs of one replica."""
    hosts_per_replica: int = 1
    """Over how many hosts the GPUs of one replica are spread, as many on each."""
    update_mode: Literal["auto", "in_place", "retract", "abort"] = "auto"
    """What becomes of samples in flight when a policy version is installed: they stay in the server and go on
    with the keys and values they have (`in_place`) or with new ones (`retract`, since SGLang 0.5.21), or are
    cut off and sent again (`abort`); `auto` is `in_place` where the server can say which version sampled
    which token."""
    mem_fraction: float = 0.0
    """Share of a GPU's memory for weights and cache; 0 is SGLang's own choice."""
    spares: int = 0
    """Servers that wait, without weights, to take over where a replica dies; each needs GPUs of its own."""
    health_s: float = 15.0
    """How long no token may come before one is asked for; and how long that may take."""
    verify: bool = True
    """On GPUs: compare a digest of each installed version with the other replicas'."""
    sglang_bucket_bytes: int = 1_073_741_824
    """How much of a version is handed to the server at once; two such buckets lie on the GPU."""
    sglang_python: str = ""
    """The interpreter that SGLang is installed for; empty is our own."""
    sglang_args: tuple[str, ...] = ()
    """Words for the end of the server's command line, where they win."""
    sglang_env: dict[str, str] = {}
    """Added to the server's environment."""
    sglang_quick_start: bool = True
    """Start servers with one import of SGLang for all their processes; false is SGLang's own way."""

    @property
    def gpus_each(self) -> int:
        """GPUs of one replica on each of its hosts."""
        return self.tensor_parallel // self.hosts_per_replica


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who says how good a sample is."""

    function: str = "math"
    """A name of the registry (`math`, `exact`) or `module:function`."""
    replicas: int = 1
    workers: int = 1
    """Killable processes in each replica."""
    timeout_s: float = 10.0
    on_error: Literal["reject", "score"] = "reject"
    error_reward: float = 0.0
    """The reward of a failed sample when `on_error` is `score`."""
    lease_s: float = 120.0


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the policy learns."""

    backend: Literal["torch"] = "torch"
    device: str = "auto"
    """`auto` (the first GPU where the host has some), `cpu`, `cuda` or `cuda:N`."""
    global_batch_size: int = 128
    """Samples a step: a multiple of rollout.samples_per_prompt."""
    micro_batch_size: int = 32
    """Samples forward and backward at once."""
    max_tokens_per_micro_batch: int = 0
    """Tokens, prompts included, forward and backward at once, instead of `micro_batch_size`; 0 is off. As few
    micro-batches as that allows, of about as many tokens each; only a single sample may have more."""
    stream_micro_batches: bool = False
    """Train on the groups that are complete while the rest of the batch is still generated."""
    updates_per_batch: int = 1
    """Optimizer updates a step; whole samples are dealt to them evenly."""
    learning_rate: float = 1e-6
    filter_groups: Literal["none", "zero_variance"] = "none"
    """`zero_variance`: groups of equal rewards, which teach nothing, are dropped and replaced."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    min_lr_frac: float = 0.1
    """Where `linear` ends, as a share of learning_rate."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl_without_signal: bool = False
    """Whether a group of equal rewards still feels the KL term; off, it moves nothing."""
    tis_max: float = 2.0
    """Upper bound of the truncated importance weight trainer/rollout; 0 turns the correction off."""
    ratio_base: Literal["trainer", "rollout"] = "trainer"
    """Whose log-probs the ratio divides by: the trainer's at the start of the step, or the rollout's."""
    frozen: tuple[str, ...] = ()
    """Regular expressions of parameter names that are not trained."""
    deterministic: bool = False
    """The same updates, bit for bit, on a GPU too: by torch's deterministic algorithms, which are slower; an
    operation that has none ends the run, and is named."""
    threads: int = 1
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep_checkpoints: int = 2
    lease_s: float = 600.0
    use_r3: bool = False
    """Routing replay: rollouts record which experts each token goes through, and training takes the same."""
    r3_replay_mode: Literal["async", "sync", "check"] = "async"
    """`async`: recorded experts go to the GPU beside other work; `sync`: just before they are used; `check`:
    they are also compared with the trainer's own choice."""
    r3_tolerance_frac: float = 0.1
    """`check` only: share of a pass' tokens and layers that may be routed elsewhere before it is an error."""
    mismatch_alarm: float = 0.1
    """Mean difference of trainer's and rollout's log-probs, in nats, that an event tells of; 0 is never."""


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The TransferQueue."""

    storage_path: str = "/dev/shm"  # noqa: S108 - the sample bus lives in shared memory
    """A tmpfs for everything that processes share: samples, policy versions, status pages."""
    max_size_gb: float = 2.0
    """Samples in shared memory, GiB; more than that is moved into files in the run folder."""
    min_valid_samples: int = 2
    """A group with fewer scored samples is dropped with a reason."""
    max_attempts: int = 5
    """Leases of one prompt that may end without its samples before it is dropped as poison."""
    group_deadline_s: float = 600.0
    """A group not complete by then, counted from its first lease, is dropped with a reason."""
    over_sampling: float = 1.0
    """Groups sampled for a batch, as a multiple of what it needs; the surplus is carried to the next one."""
    max_refills: int = 3
    """How many batches' worth of filtered groups are replaced before a batch goes short."""
    on_short_batch: Literal["train", "skip"] = "train"
    """What a step does when even that did not fill its batch; one without any group is always skipped."""
    partial_rollout_timeout_s: float = 300.0
    """When `on_partial_timeout` applies to a group that is not sampled whole, from its first lease on."""
    on_partial_timeout: Literal["wait", "drop", "finish"] = "wait"
    """`finish` ends samples with the tokens put so far, and gives up those without any."""


class DcsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The policy versions: how they lie in shared memory, and how they get from host to host."""

    keep: int = 2
    """Versions that stay readable on each host; while one is written, one less, but always the newest."""
    bucket_bytes: int = 536_870_912
    """The largest bucket of a version, each a safetensors file; a larger tensor has one to itself."""
    budget_bytes: int = 0
    """The most that versions may take of a host's memory, 0 is no limit; fewer than `keep` stay then."""
    gpu_snapshots: int = 2
    """Versions that a trainer's GPU keeps, in as much of its memory, for others to read over NVLink."""
    patience_s: float = 5.0
    """How long a store of another host may be silent before the next one pulls from the one before it."""
    relay: Literal["chain", "group"] = "chain"
    """How versions come to other hosts: from store to store, or by broadcasts to a group of all stores."""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out prompts, sampled beside training and never trained on."""

    path: str = ""
    every: int = 0
    """Steps between evaluations; 0 evaluates never, else also before the first and after the last step."""
    samples_per_prompt: int = 4
    max_prompts: int = 0
    temperature: float = 1.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    queue: QueueConfig = QueueConfig()
    dcs: DcsConfig = DcsConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def groups_per_batch(self) -> int:
        """Prompt groups one step trains on."""
        return self.train.global_batch_size // self.rollout.samples_per_prompt

    @property
    def staleness_window(self) -> int:
        """Prompt groups that may be unfinished or untrained at once."""
        surplus = math.ceil(round(self.groups_per_batch * (self.queue.over_sampling - 1), 6))  # 1.1 - 1 > 0.1
        return self.groups_per_batch * (self.run.max_staleness + 1) + surplus
