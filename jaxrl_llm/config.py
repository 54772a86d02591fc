"""Every option of a run: its type, unit, default, range and what it does. Nothing else knows a default.

A configuration file is Python with a function ``get_config()`` that returns an
``ml_collections.ConfigDict``::

    from jaxrl_llm.config import default_config

    def get_config():
        config = default_config("grpo")
        config.model.path = "builtin:tiny_addition"
        config.optimizer.learning_rate = 3e-4
        config.rewards = {"exact": {"function": "exact_match"}}
        return config

``resolve`` makes the frozen ``RunConfig`` of it, which is all that the rest of the program sees. Three
checks, each as early as it can be: ``resolve`` (no device, no file), ``with_mesh`` (needs the number of
devices) and ``check_against_model`` (needs the model's configuration and tokenizer). What one option can know
alone is in its line below; what several options must agree on is in ``validation.py``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ml_collections

from jaxrl_llm import options
from jaxrl_llm.arguments import checked
from jaxrl_llm.errors import UserError, readable
from jaxrl_llm.options import option

if TYPE_CHECKING:
    ConfigDict = Any  # its attributes are made at run time, which no type checker can follow
else:
    ConfigDict = ml_collections.ConfigDict


@dataclasses.dataclass(frozen=True)
class ModelSection(options.OptionGroup):
    """Which model is trained."""

    path: str = option(
        "",
        "Hugging Face folder, hub id, .gguf file, package:NAME for one inside an installed package, or builtin:NAME.",
    )
    architecture: dict[str, Any] = option(
        dict, "A Hugging Face config as a dict, to train from scratch in place of a path."
    )
    layers: str = option(
        "auto",
        "How training runs the layers: in a loop over stacked weights (compiles fast), or one after the other (faster "
        "on CPUs). auto: one after the other on CPUs.",
        choices=("auto", "loop", "unrolled"),
    )
    remat: str = option(
        "none",
        "What the backward pass computes again: nothing; everything in a layer (least memory, about a third more "
        "time); or all but the products with weights (dots).",
        choices=("none", "full", "dots"),
    )
    lora_rank: int = option(
        0,
        "Train adapters of this rank (LoRA) in place of the weights, for the policy and a critic of it; 0 is off.",
        low=0,
    )
    lora_alpha: float = option(16.0, "The adapters' part is scaled by lora_alpha / lora_rank.", above=0.0)
    lora_targets: tuple[str, ...] = option(
        ("q", "k", "v", "o", "gate", "up", "down"),
        "Which matrices have adapters.",
        choices=("q", "k", "v", "o", "gate", "up", "down"),
    )


@dataclasses.dataclass(frozen=True)
class TokenizerSection(options.OptionGroup):
    """Which tokenizer encodes the prompts."""

    path: str = option("", "Where the tokenizer is; empty means model.path.")


@dataclasses.dataclass(frozen=True)
class DataConfig(options.OptionGroup):
    """Where the prompts come from."""

    train: str = option("", "Training rows: .jsonl, .parquet, a Hugging Face dataset id, or builtin:NAME/SPLIT.")
    eval: str = option("", "Evaluation rows, never trained on; empty means no evaluation.")
    max_prompt_tokens: int = option(512, "Longest prompt, after the chat template.", low=1, unit="tokens")
    overlong_prompts: str = option(
        "filter",
        "What happens to longer prompts: left out, cut, or an error. Counts are printed.",
        choices=("filter", "truncate_left", "truncate_right", "error"),
    )
    prompt_column: str = option("", "Column of the prompt; empty means the first known name that is there.")
    answer_column: str = option("", "Column of the answer; empty means the first known name that is there.")
    system_prompt: str = option("", "Put before each prompt as the system message of the chat template.")
    apply_chat_template: str = option(
        "auto",
        "Whether prompts go through the tokenizer's chat template; auto: where it has one.",
        choices=("auto", "always", "never"),
    )
    shuffle: bool = option(True, "A new order of the rows each epoch, from the seed.")
    num_epochs: int = option(0, "Train for so many passes over the rows; needs num_steps = 0.", low=0, unit="epochs")


@dataclasses.dataclass(frozen=True)
class AlgorithmSection:
    """What is learned: a name in ``jaxrl_llm.algorithms.ALGORITHMS`` and that algorithm's own options.

    In a configuration the options stand beside the name: ``algorithm.name``, ``algorithm.kl_coef`` … .
    Another name brings the other algorithm's options and defaults; options of a third are refused.
    """

    name: str
    options: Any

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], path: str, root: type) -> AlgorithmSection:
        """Called by ``options.build``."""
        name = values.get("name", "grpo")
        entry = _algorithm(name, path)
        own = {key: value for key, value in values.items() if key != "name"}
        _refuse_foreign(name, own, path)
        return cls(name, options.build(entry.options, own, path, root))

    @classmethod
    def describe(cls, path: str) -> Iterator[tuple[str, str]]:
        """Called by ``options.describe``: the options of every algorithm."""
        algorithms = _algorithms()
        yield f"{path}.name", f"str, default 'grpo', one of {', '.join(algorithms)}. Which algorithm."
        for name, entry in algorithms.items():
            for option_path, text in options.describe(entry.options, path):
                yield option_path, f"({name}) {text}"

    def to_mapping(self) -> dict[str, Any]:
        return {"name": self.name, **options.to_dict(self.options)}


@dataclasses.dataclass(frozen=True)
class RolloutConfig(options.OptionGroup):
    """How completions are sampled, and how much memory the decoder takes."""

    samples_per_prompt: int = option(8, "Completions of each prompt: the size of a group.", low=1)
    max_new_tokens: int = option(256, "A completion is cut here.", low=1, unit="tokens")
    min_new_tokens: int = option(0, "No end of sequence before this many.", low=0, unit="tokens")
    temperature: float = option(1.0, "Logits are divided by it, here and in the trainer; 0 is greedy.", low=0.0)
    top_p: float = option(1.0, "Keep the likeliest tokens that have this mass together; 1 is off.", above=0, high=1)
    top_k: int = option(0, "Keep this many likeliest tokens; 0 is off.", low=0)
    min_p: float = option(0.0, "Keep tokens at least this likely relative to the likeliest; 0 is off.", low=0, high=1)
    stop: tuple[str, ...] = option((), "Strings that end a completion; the text is cut before them, the ids are not.")
    ignore_eos: bool = option(False, "Go on after an end of sequence, to max_new_tokens (for benchmarks).")
    num_slots: int = option(64, "Sequences decoded at once by each replica.", low=1)
    page_size: int = option(16, "Tokens of one page of the key/value cache.", low=1, unit="tokens")
    num_pages: int = option(0, "Pages of each replica; 0: enough for all slots at full length.", low=0, unit="pages")
    tokens_per_dispatch: int = option(16, "Tokens decoded per slot before the host looks again.", low=1, unit="tokens")
    prefill_tokens: int = option(
        2048,
        "Prompt tokens processed at once by each replica, and between two decode dispatches.",
        low=1,
        unit="tokens",
    )
    tensor: int = option(
        0,
        "Shards of each matrix while completions are sampled (verl calls it tensor_model_parallel_size): a divisor or "
        "a multiple of mesh.tensor; 0: as in mesh.tensor. All other devices are replicas, each with its own slots and "
        "pages.",
        low=0,
        unit="devices",
    )
    attention: str = option(
        "auto",
        "How decode attends to cached pages: gathered (copied to dense arrays once a dispatch: CPUs) or an "
        "implementation of paged attention; a named one that can't run is an error. auto: gathered on CPUs, else the "
        "fastest kernel.",
    )
    weight_dtype: str = option(
        "compute",
        "Of the matrices of layers when completions are sampled, evaluation included: the compute dtype, or 8 bits "
        "with a scale for each output channel (a quarter of float32 in memory and moved). In 8 bits the sampler "
        "differs from the trained policy by rounding; rollout/logprob_diff_mean says how much, the metrics of the "
        "rollout correction (rollout_corr/…) are told too, and checks.* have no bound unless one is given. float8 is "
        "e4m3fn.",
        choices=("compute", "int8", "float8"),
    )


@dataclasses.dataclass(frozen=True)
class TrainingConfig(options.OptionGroup):
    """How one batch of rollouts becomes optimizer updates."""

    mini_batch_size: int = option(
        0, "Prompts of one optimizer update; 0 means train_batch_size.", low=0, unit="prompts"
    )
    epochs: int = option(1, "Passes over the rollouts of a step.", low=1)
    micro_batch_tokens: int = option(
        4096,
        "Tokens one device processes at once; bounds memory, never changes the result.",
        low=1,
        unit="tokens",
    )
    row_tokens: int = option(
        0,
        "Length of a packed row; 0 means micro_batch_tokens, at most 8192, or the longest prompt and completion.",
        low=0,
        unit="tokens",
    )
    share_prompts: bool = option(
        True, "Compute the prompt of a group once for all its completions in a row; changes speed, not the result."
    )
    sequence_parallel: bool = option(
        False,
        "Split tokens over mesh.tensor as well between the products with weights: less memory for long rows, the same "
        "result.",
    )
    pipeline_micro_batches: int = option(
        0,
        "Micro-batches that go through mesh.pipeline together; a multiple of it. With more, stages are idle less "
        "often, and more of their inputs are kept for the backward pass. 0: four for each stage.",
        low=0,
    )
    pipeline_repeats: int = option(
        1,
        "Pieces of the stack of layers that each stage holds. 1 is GPipe; with more, the interleaved (circular) "
        "schedule, stages are idle so many times shorter and hand on so many times more.",
        low=1,
    )
    logprob_chunk_tokens: int = option(
        0,
        "Tokens whose logits exist at once on a device. 0: 1024, on CPUs 256 (with every update they would fault a "
        "larger block in anew).",
        low=0,
        unit="tokens",
    )
    logprob_vocab_chunk: int = option(
        0,
        "Entries of the vocabulary whose logits exist at once on a device, for logprob_chunk_tokens tokens: smaller "
        "logits (whether the program is smaller, kernels/README.md measures), the same result to rounding, slower on "
        "CPUs. 0: all, the only one for distillation.",
        low=0,
        unit="entries",
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(options.OptionGroup):
    """AdamW with a warm-up, a schedule and a clip of the global gradient norm."""

    name: str = option("adamw", "The optimizer.", choices=("adamw", "sgd"))
    learning_rate: float = option(1e-6, "Its largest value.", low=0.0)
    b1: float = option(0.9, "Decay of the gradient's average.", low=0.0, below=1.0)
    b2: float = option(0.999, "Decay of the squared gradient's average.", low=0.0, below=1.0)
    eps: float = option(1e-8, "Added to the denominator.", above=0.0)
    weight_decay: float = option(0.01, "Decoupled, of every parameter, as in verl.", low=0.0)
    warmup_steps: int = option(
        0, "Updates in which the learning rate rises to its largest value in equal parts.", low=0, unit="updates"
    )
    schedule: str = option("constant", "After the warm-up.", choices=("constant", "cosine", "linear"))
    final_fraction: float = option(0.1, "Of the learning rate, at the end of cosine and linear.", low=0.0, high=1.0)
    clip_norm: float = option(1.0, "Largest global gradient norm; 0 is off.", low=0.0)


@dataclasses.dataclass(frozen=True)
class CriticOptimizerConfig(OptimizerConfig):
    """As `optimizer`, for the critic."""

    learning_rate: float = option(1e-5, "Its largest value.", low=0.0)


@dataclasses.dataclass(frozen=True)
class CriticConfig(options.OptionGroup):
    """The critic of algorithms that have one (`ppo`): a model of its own with a value head."""

    path: str = option("", "Like model.path, also of a sequence classifier with one label; empty: the policy's start.")
    optimizer: CriticOptimizerConfig = option(CriticOptimizerConfig, "")
    warmup_steps: int = option(
        0,
        "First steps in which the critic alone is updated; the policy's schedule begins after them.",
        low=0,
        unit="steps",
    )


@dataclasses.dataclass(frozen=True)
class ReferenceConfig(options.OptionGroup):
    """The frozen policy that a KL is measured against."""

    path: str = option(
        "",
        "Like model.path, or the work folder of an earlier run (its newest checkpoint, and the same one when this run "
        "is resumed); empty: the policy's start, which with adapters is their base and takes no memory.",
    )


@dataclasses.dataclass(frozen=True)
class TeacherConfig(options.OptionGroup):
    """The frozen model that `distillation` learns from."""

    path: str = option("", "Like model.path; its tokenizer must be the policy's.")


@dataclasses.dataclass(frozen=True)
class RewardConfig(options.OptionGroup):
    """One term of the reward: ``weight`` times what ``function`` returns."""

    function: str = option("", "A built-in name, 'module:function' or 'path.py:function'.")
    weight: float = option(1.0, "Factor in the sum.")
    options: dict[str, Any] = option(dict, "Keyword arguments of the function.")


@dataclasses.dataclass(frozen=True)
class RewardModelConfig(options.OptionGroup):
    """A model whose score of an answer is a term of the reward, beside those of `rewards`."""

    path: str = option(
        "", "A sequence classifier: of a decoder family, BERT or RoBERTa; folder or hub id. Empty: none."
    )
    weight: float = option(1.0, "Factor in the sum.")
    max_tokens: int = option(
        0,
        "Longer texts lose the beginning of their prompt. 0: what the model can read, at most 1024.",
        low=0,
        unit="tokens",
    )
    batch_tokens: int = option(8192, "Padded tokens scored at once.", low=1, unit="tokens")
    template: str = option(
        "auto",
        "How prompt and answer become a text: its tokenizer's chat template, a pair of sentences, or one after the "
        "other. auto: the template where there is one, a pair for BERT and RoBERTa.",
        choices=("auto", "chat", "pair", "concat"),
    )
    output: str = option("logit", "The score: the label's logit or its probability.", choices=("logit", "probability"))
    label: int = option(-1, "Index of the label that is the score, of a model with several; -1: its only one.", low=-1)
    failure_score: float = option(0.0, "In place of a score that is not finite.")


@dataclasses.dataclass(frozen=True)
class RewardRunnerConfig(options.OptionGroup):
    """The worker processes that rewards run in."""

    num_workers: int = option(2, "Processes.", low=1)
    timeout_s: float = option(
        10.0, "A sample that takes longer gets the failure score.", above=0.0, high=86400.0, unit="s"
    )
    failure_score: float = option(0.0, "The score after an exception, a time-out, NaN or infinity.")
    on_all_failed: str = option("stop", "When every score of a step failed.", choices=("stop", "warn"))
    memory_bytes: int = option(
        4 * 2**30,
        "Address space of each worker: a call that asks for more fails with a MemoryError; 0 is no limit.",
        low=0,
        unit="bytes",
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig(options.OptionGroup):
    """Sizes of the device mesh. One may be -1: whatever the others leave."""

    data: int = option(1, "Replicas of everything.", low=-1, unit="devices")
    fsdp: int = option(
        -1, "Shards of parameters and optimizer state; divides the model's hidden size.", low=-1, unit="devices"
    )
    tensor: int = option(
        1,
        "Shards of each matrix; divides the numbers of heads and the model's intermediate size.",
        low=-1,
        unit="devices",
    )
    pipeline: int = option(
        1,
        "Stages that the layers are split into when training (see training.pipeline_*); divides their number. When "
        "generating, replicas.",
        low=-1,
        unit="devices",
    )


@dataclasses.dataclass(frozen=True)
class BlockConfig(options.OptionGroup):
    """Devices of a role's own, as a mesh; all sizes 0: it is colocated with the policy. Beside others, 0 is
    1."""

    data: int = option(0, "As mesh.data, of this block.", low=0, unit="devices")
    fsdp: int = option(0, "As mesh.fsdp, of this block.", low=0, unit="devices")
    tensor: int = option(0, "As mesh.tensor, of this block.", low=0, unit="devices")
    pipeline: int = option(0, "As mesh.pipeline, of this block.", low=0, unit="devices")
    beside: str = option("", "In place of sizes: the role whose block this one shares; empty: none.")

    @property
    def mesh(self) -> MeshConfig | None:
        """The sizes; None without."""
        sizes = {axis.name: getattr(self, axis.name) for axis in dataclasses.fields(MeshConfig)}
        return MeshConfig(**{axis: max(size, 1) for axis, size in sizes.items()}) if any(sizes.values()) else None


@dataclasses.dataclass(frozen=True)
class PlacementConfig(options.OptionGroup):
    """Which roles have devices of their own. The policy's block (`mesh`) is the first devices; the others follow it in
    the order given here, and none overlap. Of several processes each gives an equal part of its devices to every
    block."""

    generation: BlockConfig = option(BlockConfig, "")
    critic: BlockConfig = option(BlockConfig, "")
    reference: BlockConfig = option(BlockConfig, "")
    teacher: BlockConfig = option(BlockConfig, "")
    reward_model: BlockConfig = option(BlockConfig, "")
    staleness: int = option(
        0,
        "1: the completions of the next step are sampled on the generation block while this one is learned, so with "
        "the parameters from before it. Needs placement.generation and a correction (algorithm.rollout_is or "
        "rollout_rs), and keeps a copy of the policy in the compute dtype, by which decoder and trainer are compared.",
        low=0,
        high=1,
        unit="steps",
    )
    uncorrected: bool = option(False, "With staleness 1: learn from older samples as if they were new.")

    @classmethod
    def roles(cls) -> list[str]:
        """What can be placed."""
        return [field.name for field in dataclasses.fields(cls) if field.default_factory is BlockConfig]

    def blocks(self) -> dict[str, MeshConfig]:
        """The blocks beside the policy's, by the role that has given the sizes, in the order of their devices."""
        named = {role: getattr(self, role).mesh for role in self.roles()}
        return {role: mesh for role, mesh in named.items() if mesh is not None}

    def owner(self, role: str) -> str:
        """Whose block a role is on: a key of `blocks`, or ``policy``."""
        block = getattr(self, role, None)
        if block is None or block.mesh is not None:
            return "policy" if block is None else role
        return block.beside or "policy"


@dataclasses.dataclass(frozen=True)
class ProcessesConfig(options.OptionGroup):
    """How the processes of a run find each other; how many there are, the command line or the cluster says."""

    heartbeat_s: int = option(
        60,
        "A process that the others have not heard of for so long is taken for dead, and they end.",
        low=5,
        high=86400,
        unit="s",
    )
    join_timeout_s: int = option(
        300, "How long the first process to start waits for the last one.", low=1, high=86400, unit="s"
    )


@dataclasses.dataclass(frozen=True)
class HybridEngineConfig(options.OptionGroup):
    """How parameters move between the training and the generation layout, and what rests in the host's memory.

    In an update the layers of `offload_actor_layers` are whole on the devices. A loop over layers can fetch one after
    the other from the host (tried: equal bits on a CPU, and a program for an H200 that copies slices), but sums of
    gradients are stacks of all layers: they would have to be in two parts as well.
    """

    bucket_bytes: int = option(256 * 2**20, "Bytes moved at once: bounds the extra memory.", low=1, unit="bytes")
    offload_optimizer: bool = option(
        False,
        "Optimizer states of all roles stay in pinned host memory: an update fetches those of one layer at a time, and "
        "of what is no layer one array, and puts them back.",
    )
    offload_reference: bool = option(
        False, "The reference rests in pinned host memory, and is on the devices while it scores."
    )
    offload_critic: bool = option(
        False, "The critic and its optimizer state rest in pinned host memory, and are on the devices while it is used."
    )
    offload_actor_layers: int = option(
        0,
        "The policy's first so many layers rest in pinned host memory: a layout change reads them one by one, and they "
        "are on the devices while log-probabilities and updates are computed.",
        low=0,
        unit="layers",
    )
    kv_cache_policy: str = option(
        "static",
        "Of the decoder's pages: static keeps them allocated between steps. dynamic frees them for training, and where "
        "rollout.num_pages is 0 makes as many as the memory that is free at the first generation holds, at most "
        "enough for all slots.",
        choices=("static", "dynamic"),
    )
    enable_3d_resharding: bool = option(
        True,
        "False keeps the sharding of training while completions are sampled: nothing moves between steps, and every "
        "dispatch of the decoder gathers what fsdp splits, layout/gathered_bytes of it. It needs mesh.pipeline = 1 and "
        "the tensor size of training.",
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(options.OptionGroup):
    """When the run is saved and what is kept."""

    every_steps: int = option(50, "0 saves at the end only.", low=0, unit="steps")
    keep: int = option(2, "Latest checkpoints kept.", low=1)
    best_metric: str = option("eval/accuracy", "The checkpoint where it is highest is kept too; empty: none is.")
    save_final: bool = option(True, "Save after the last step.")


@dataclasses.dataclass(frozen=True)
class EvalConfig(options.OptionGroup):
    """When and how the evaluation rows are answered."""

    every_steps: int = option(0, "0: only before and after.", low=0, unit="steps")
    max_rows: int = option(0, "Use the first so many rows; 0 is all.", low=0, unit="rows")
    samples_per_prompt: int = option(1, "Completions of each row, for pass@k.", low=1)
    temperature: float = option(0.0, "0 is greedy.", low=0.0)
    accuracy_reward: str = option(
        "",
        "The reward, by its name in rewards, that is 1 or more where an answer is correct: accuracy and pass@k "
        "count it. Empty means the only reward; a reward model's score has no such bound, so that alone it gives "
        "eval/reward/mean and neither of these.",
    )
    before: bool = option(True, "Evaluate before the first step.")
    after: bool = option(True, "Evaluate after the last step.")


@dataclasses.dataclass(frozen=True)
class ChecksConfig(options.OptionGroup):
    """Largest allowed |sampler_logprobs - old_logprobs| of the sampled tokens; a run beyond it stops."""

    logprob_diff_mean: float = option(
        -1.0,
        "Of the mean; -1: 1e-4 in float32, 1e-2 in bfloat16, divided by a temperature below 1; none where "
        "rollout.weight_dtype is not compute.",
        low=-1.0,
        infinite=True,
    )
    logprob_diff_max: float = option(
        -1.0,
        "Of the largest; -1: 1e-2 in float32, divided by a temperature below 1; none in bfloat16 or where "
        "rollout.weight_dtype is not compute.",
        low=-1.0,
        infinite=True,
    )

    def bounds(
        self, compute_dtype: str, temperature: float = 1.0, weight_dtype: str = "compute"
    ) -> tuple[float, float]:
        """The bounds (mean, maximum) for a run that computes in ``float32`` or ``bfloat16``.

        Logits are divided by the temperature, and what they were rounded by with them. Greedy decoding (0) reports
        log-probabilities at temperature 1.
        """
        sharpened = min(temperature, 1.0) or 1.0
        mean, largest = (
            bound / sharpened for bound in {"float32": (1e-4, 1e-2), "bfloat16": (1e-2, math.inf)}[compute_dtype]
        )
        if weight_dtype != "compute":  # the sampler is another policy, as asked for
            mean = largest = math.inf
        return (
            mean if self.logprob_diff_mean == -1 else self.logprob_diff_mean,
            largest if self.logprob_diff_max == -1 else self.logprob_diff_max,
        )


@dataclasses.dataclass(frozen=True)
class RunConfig(options.OptionGroup):
    """A whole run. Frozen and complete: what ``resolve`` returns has every derived value filled in."""

    seed: int = option(0, "Everything random follows from it.", low=0, high=2**32 - 1)
    deterministic: bool = option(
        False,
        "On GPUs: the same bits in every run, by XLA's deterministic operations. It costs speed: sums that meet in one "
        "place are put in order first, and products are not chosen by trying. CPUs have the same bits without.",
    )
    num_steps: int = option(100, "Rollout batches to train on; 0 means data.num_epochs passes.", low=0, unit="steps")
    train_batch_size: int = option(64, "Prompts of one step.", low=1, unit="prompts")
    dtype: str = option(
        "auto",
        "Of computing and generating; auto: bfloat16 on accelerators, float32 on a CPU. Master parameters, "
        "log-probabilities and losses are float32 always.",
        choices=("auto", "float32", "bfloat16"),
    )
    log_level: str = option("info", "What is printed.", choices=("debug", "info", "warning", "error"))
    watchdog_s: float = option(
        600.0,
        "After so long without a sign of progress every process prints the phase it is in and what its threads are "
        "doing, again and again while it lasts; it ends nothing. 0 is off.",
        low=0.0,
        unit="s",
    )
    profile_steps: tuple[int, ...] = option(
        (), "Steps, counted from 1, whose profile is written to WORKDIR/profile; see the README.", low=1
    )
    model: ModelSection = option(ModelSection, "")
    tokenizer: TokenizerSection = option(TokenizerSection, "")
    data: DataConfig = option(DataConfig, "")
    algorithm: AlgorithmSection = dataclasses.field(
        default_factory=lambda: AlgorithmSection.from_mapping({}, "algorithm", RunConfig)
    )
    rollout: RolloutConfig = option(RolloutConfig, "")
    training: TrainingConfig = option(TrainingConfig, "")
    optimizer: OptimizerConfig = option(OptimizerConfig, "")
    critic: CriticConfig = option(CriticConfig, "")
    reference: ReferenceConfig = option(ReferenceConfig, "")
    teacher: TeacherConfig = option(TeacherConfig, "")
    rewards: dict[str, RewardConfig] = option(dict, "Terms of the reward, by any name.")
    reward_model: RewardModelConfig = option(RewardModelConfig, "")
    reward_runner: RewardRunnerConfig = option(RewardRunnerConfig, "")
    mesh: MeshConfig = option(MeshConfig, "")
    placement: PlacementConfig = option(PlacementConfig, "")
    processes: ProcessesConfig = option(ProcessesConfig, "")
    hybrid_engine: HybridEngineConfig = option(HybridEngineConfig, "")
    checkpoint: CheckpointConfig = option(CheckpointConfig, "")
    eval: EvalConfig = option(EvalConfig, "")
    checks: ChecksConfig = option(ChecksConfig, "")


@checked
def default_config(algorithm: str = "grpo") -> ConfigDict:
    """The defaults as an editable ``ConfigDict``, the start of every ``get_config()``.

    ``algorithm`` holds only its name: options set on it are kept, the rest come from that algorithm's
    defaults. So ``--config.algorithm.name=…`` changes the algorithm without leaving another one's options
    behind. Nothing is checked here; ``resolve`` does, and knows the full path of every key.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(RunConfig):
        if field.name == "algorithm":
            values[field.name] = {"name": algorithm}
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        else:
            assert field.default_factory is not dataclasses.MISSING
            default = field.default_factory()
            values[field.name] = default if isinstance(default, dict) else options.to_dict(default)
    return ml_collections.ConfigDict(values, type_safe=False)


@checked
def resolve(
    config: ConfigDict | dict[str, Any], device_count: int | None = None, *, training: bool = True
) -> RunConfig:
    """Validates a configuration and fills in every derived value. Touches no device and no file.

    Args:
      device_count: how many devices the mesh must cover; None leaves a -1 of the mesh for ``with_mesh``.
      training: False for using a model only: leaves out the checks of what is learned from.

    Raises:
      UserError: one paragraph per mistake: unknown keys, wrong types, ranges, options that exclude each
      other.
    """
    from jaxrl_llm import validation

    run = options.build(RunConfig, config if isinstance(config, dict) else config.to_dict())
    validation.refuse_or_warn(validation.conflicts(run, training))
    rows = dataclasses.replace(
        run.training,
        mini_batch_size=run.training.mini_batch_size or run.train_batch_size,
        row_tokens=run.training.row_tokens or default_row_tokens(run),
    )
    tokenizer = TokenizerSection(path=run.tokenizer.path or run.model.path)
    evaluation = run.eval
    if len(run.rewards) == 1:
        evaluation = dataclasses.replace(evaluation, accuracy_reward=next(iter(run.rewards)))
    run = dataclasses.replace(
        run, training=rows, tokenizer=tokenizer, eval=evaluation, algorithm=_told_of_low_precision(run)
    )
    return run if device_count is None else with_mesh(run, device_count)


def _told_of_low_precision(run: RunConfig) -> AlgorithmSection:
    """The algorithm's section; the sampler's distance to the policy is told wherever it samples in 8 bits."""
    section = run.algorithm
    if run.rollout.weight_dtype == "compute" or not hasattr(section.options, "rollout_metrics"):
        return section
    return dataclasses.replace(section, options=dataclasses.replace(section.options, rollout_metrics=True))


REWARD_MODEL = "reward_model"
"""The name of the reward model's score among the rewards."""

LONG_ROW_TOKENS = 8192
"""Rows are as long as a micro-batch allows, up to this. Attention meets only what can be seen, so a long row costs no
more than short ones, fills better and shares more prompts; beyond it, finding what can be seen begins to cost."""


def default_row_tokens(config: RunConfig) -> int:
    """`training.row_tokens` where it is not given."""
    return max(longest_block(config), min(config.training.micro_batch_tokens, LONG_ROW_TOKENS))


def longest_sequence(config: RunConfig) -> int:
    """Most tokens of one sequence."""
    entry = _algorithm(config.algorithm.name)
    return entry.longest(config.algorithm.options, config.data.max_prompt_tokens, config.rollout.max_new_tokens)


def longest_block(config: RunConfig) -> int:
    """Most tokens that must stand together in one row: a sequence, or two that are compared."""
    return longest_sequence(config) * (2 if _algorithm(config.algorithm.name).compares else 1)


def with_mesh(config: RunConfig, device_count: int) -> RunConfig:
    """``config`` with a mesh that has, together with the blocks of ``placement``, exactly ``device_count`` devices.

    Raises:
      UserError: the sizes don't multiply to it, or ``rollout.tensor`` can't be made of them; the message lists what
        can. Or options do not fit a size that was -1.
    """
    from jaxrl_llm import placement_rules, validation

    fitted = dataclasses.replace(config, mesh=placement_rules.fit_policy(config, device_count))
    placement_rules.check_blocks(fitted)
    if fitted.mesh != config.mesh:
        validation.refuse_or_warn(validation.mesh_conflicts(fitted))
    return fitted


def check_against_model(config: RunConfig, model_config: Any, tokenizer: Any) -> None:
    """Checks what only the model and the tokenizer can tell: context, sizes over the mesh, special ids.

    Args:
      model_config: a ``jaxrl_llm.models.config.ModelConfig``.
      tokenizer: the tokenizer that encodes the prompts.

    Raises:
      UserError: prompt and response don't fit the context, ``mesh.tensor`` or ``mesh.fsdp`` doesn't divide the
        sizes that it splits, or an end or padding id is missing or outside the vocabulary.
    """
    from jaxrl_llm import validation

    validation.refuse_or_warn(validation.model_conflicts(config, model_config, tokenizer))


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """What a run of some length amounts to. A step is one batch of prompts, generated (or read) and trained
    on."""

    steps_per_epoch: int
    total_steps: int
    optimizer_updates: int


def step_counts(config: RunConfig, num_rows: int) -> StepCounts:
    """The lengths of a run on ``num_rows`` training rows; a last partial batch is dropped.

    Raises:
      UserError: there are fewer rows than one batch.
    """
    steps_per_epoch = num_rows // config.train_batch_size
    if steps_per_epoch == 0:
        raise UserError(
            f"train_batch_size = {config.train_batch_size} is larger than the {num_rows} training rows of "
            f"data.train = {config.data.train!r}: not one batch can be made. Lower it or add rows."
        )
    total = config.num_steps or steps_per_epoch * config.data.num_epochs
    mini_batches = config.train_batch_size // (config.training.mini_batch_size or config.train_batch_size)
    return StepCounts(steps_per_epoch, total, total * mini_batches * config.training.epochs)


def option_type(path: str, algorithm: str) -> Any:
    """The type of the option at a dotted path: a class, ``tuple[X, ...]``, or Any in a free-form dict.

    Args:
      algorithm: whose options stand in the group ``algorithm``.

    Raises:
      UserError: there is no such option.
    """
    group, _, rest = path.partition(".")
    if group != "algorithm" or rest in ("", "name"):
        return str if rest == "name" and group == "algorithm" else options.annotation_at(RunConfig, path)
    entry = AlgorithmSection.from_mapping({"name": algorithm}, group, RunConfig)
    _refuse_foreign(algorithm, [rest.partition(".")[0]], group)
    return options.annotation_at(type(entry.options), rest, group, RunConfig)


def describe_options() -> Iterator[tuple[str, str]]:
    """Every option as (dotted path, one line about it), for ``--help_options``."""
    return options.describe(RunConfig)


def save(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Writes the configuration as JSON; ``load`` gives an equal object back."""
    pathlib.Path(path).write_text(json.dumps(options.to_dict(config), indent=2) + "\n", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> RunConfig:
    """Reads what ``save`` wrote, and checks it like any other configuration.

    Raises:
      UserError: the file is not there, is not JSON, or holds a mistake.
    """
    try:
        with readable(f"The saved configuration {path}"):
            if not pathlib.Path(path).exists():
                raise UserError(f"There is no saved configuration at {path}.")
            content = pathlib.Path(path).read_bytes()
        values = json.loads(content.decode("utf-8"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"The saved configuration {path} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise UserError(f"The saved configuration {path} is a JSON {type(values).__name__}, not a group of options.")
    return resolve(values)


def _algorithms() -> Mapping[str, Any]:
    from jaxrl_llm.algorithms import (
        ALGORITHMS,
    )  # not at the top: algorithms declare their options with `option`

    return ALGORITHMS


def _algorithm(name: Any, path: str = "algorithm") -> Any:
    """The algorithm of a name, or of ``path.py:name``."""
    from jaxrl_llm.algorithms import find_algorithm

    algorithms = _algorithms()
    if not isinstance(name, str) or (":" not in name and name not in algorithms):
        raise UserError(
            f"{path}.name = {name!r} is not an algorithm.{options.nearest(str(name), algorithms)} One of your own is "
            "'path.py:its_name'."
        )
    return find_algorithm(name)


def _refuse_foreign(name: str, keys: Iterable[str], path: str) -> None:
    """Refuses options of other algorithms by telling whose they are."""
    algorithms = _algorithms()
    for key in keys:
        owners = [other for other, entry in algorithms.items() if key in _field_names(entry.options)]
        known = _field_names(_algorithm(name).options)
        if owners and key not in known:
            own = ", ".join(sorted(known)) or "none"
            raise UserError(
                f"{path}.{key} is an option of {', '.join(owners)}, not of {path}.name = {name!r}. Remove it, or "
                f"change the name. Options of {name}: {own}."
            )


def _field_names(section: type) -> set[str]:
    return {field.name for field in dataclasses.fields(section)}
