"""The configuration: every section and key, its type, its default and what it does.

The descriptions under the keys are also what `docs/configuration.md` prints. Nothing here imports torch.
"""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tightfit.errors import BudgetError
from tightfit.models.decoder_config import DecoderConfig
from tightfit.names import (
    BUDGET_AND_COMPILED_BLOCKS,
    BUDGET_AND_RECOMPUTE,
    RECOMPUTE_AND_COMPILED_BLOCKS,
    STEP_IN_BACKWARD_AND_CLIPPING,
    STEP_IN_BACKWARD_AND_SCALER,
    optimizer_class,
    parse_allocator,
    parse_optimizer,
)
from tightfit.planner.levers import CLASSES, lever_types
from tightfit.units import check_budget, parse_bytes

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
OpenShare = Annotated[float, Field(ge=0, lt=1)]
InnerShare = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def _readable_budget(budget: int | str | None) -> int | str | None:
    """The budget as written."""
    if budget is not None:
        try:
            check_budget(budget)
        except BudgetError as error:
            raise ValueError(str(error)) from error
    return budget


def _known_allocator(setting: str | None) -> str | None:
    if setting is not None:
        parse_allocator(setting)
    return setting


def _known_optimizer(name: str) -> str:
    parse_optimizer(name)
    return name


def _as_optimizer(value: Any) -> Any:
    """A mapping with a class and its arguments as the text that stands for both."""
    if not isinstance(value, dict):
        return value
    arguments = {str(key): each for key, each in value.items() if key != "class"}
    if not isinstance(value.get("class"), str):
        raise ValueError("a mapping needs the key class: {class: torch.optim:RAdam, lr: 0.001}")
    return optimizer_class(value["class"], arguments)


# Arguments of an optimizer that are keys of the section `training`.
_OF_OPTIMIZER = {"lr": "learning_rate", "weight_decay": "weight_decay"}


def _as_tuple(value: Any) -> Any:
    """YAML has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _known_lever(name: str) -> str:
    """A class of levers or one lever, by name."""
    known = [*(kind.name for kind in lever_types()), *CLASSES]
    if name not in known:
        named = [f"'{each}'" for each in known]
        wanted = f"Input should be {', '.join(named[:-1])} or {named[-1]}"
        raise PydanticCustomError("literal_error", wanted)  # pyright: ignore[reportArgumentType] - a literal for templates
    return name


def _lever_names(*, on_request: bool) -> str:
    return ", ".join(kind.name for kind in lever_types() if kind.on_request == on_request)


LeverName = Annotated[str, AfterValidator(_known_lever)]
LeverNames = Annotated[Literal["exact", "rounding"] | tuple[LeverName, ...] | None, BeforeValidator(_as_tuple)]


def _readable_size(size: int | str | None) -> int | str | None:
    """A size as written."""
    try:
        if size is not None and parse_bytes(size) <= 0:
            raise ValueError(f"{size!r} is not above zero")
    except BudgetError as error:
        raise ValueError(str(error)) from error
    return size


class AdapterConfig(Section):
    """Low-rank adapters (LoRA) on linear layers, or any other adapters of `peft`. Only they are trained; the model is
    frozen. Needs weights."""

    config: Annotated[str, Field(min_length=1)] | None = None
    """A JSON file with a `PeftConfig` (`LoraConfig(...).save_pretrained` writes it as adapter_config.json): DoRA, VeRA,
    IA3, AdaLoRA, OFT, prompts and prefixes, `modules_to_save`, ... In the place of all keys here but `base`."""
    r: Count = 8
    """Rank of the two matrices that are added to a layer."""
    alpha: Positive = 16.0
    """The adapter's output is scaled by `alpha / r`."""
    dropout: OpenShare = 0.0
    """Probability of dropping an element of an adapter's input."""
    target_modules: Annotated[str | tuple[str, ...] | None, BeforeValidator(_as_tuple)] = None
    """Names of the layers that get an adapter (`[q_proj, v_proj]`), or `all-linear`; null: `peft`'s choice for the
    architecture, and all linear layers where it has none."""
    base: Literal["fp32", "bf16", "int8", "fp8", "nf4"] = "fp32"
    """Storage of the frozen weights: all in fp32, or all in bf16; or those of linear layers, except the head, and of
    fused experts in 8 bits (int8, or fp8 as storage) with a scale per row, or in 4-bit NormalFloat with a scale per 64
    weights (bitsandbytes; Dettmers et al. 2023), and the others in `model.dtype`."""

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        beside = sorted(self.model_fields_set - {"config", "base"})
        default = [key for key in beside if getattr(self, key) != type(self).model_fields[key].default]
        if self.config is not None and default:
            raise ValueError(f"config {self.config} and {default[0]} are both set: write {default[0]} in that file")
        return self


class PretrainedModel(Section):
    """A causal language model from `transformers`."""

    path: str
    """A local Hugging Face folder, a config.json, or the folder of a finished run of tightfit."""
    random_init: bool = False
    """Build the model from its config with new weights instead of loading the weights."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the weights. `auto`: the checkpoint's own, bf16 or fp32 (fp16 is read as fp32); fp32 for new weights and
    from GGUF. With adapters it is `adapter.base`; on a base in few bits, the dtype of the others, fp32 if `auto`."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """The implementation of attention in `transformers`; `auto`: its own choice. `flash_attention_2` needs the package
    flash_attn and a card; a dry run plays it as PyTorch's flash attention."""
    gguf_file: str | None = None
    """Name of a GGUF file inside the folder that holds the weights."""
    adapter: AdapterConfig | None = None
    """Train low-rank adapters and nothing else, as a mapping (`{}` has the defaults); null: train the whole model."""

    @model_validator(mode="after")
    def _something_to_adapt(self) -> Self:
        if self.adapter is not None and self.random_init:
            raise ValueError(
                "adapter and random_init are both set: an adapter is trained on weights that are there, remove one"
            )
        if self.adapter is not None and self.dtype != "auto" and self.adapter.base in ("fp32", "bf16"):
            raise ValueError(
                f"dtype {self.dtype} and adapter are both set: adapter.base is the dtype of the frozen weights, remove "
                "dtype"
            )
        return self


class DataConfig(Section):
    """The data to train on."""

    source: str = "default"
    """`default` (the Python standard library's own sources and help topics), a file of JSON lines, a JSON list, a table
    (CSV, TSV), a text file, a folder of these (compressed too), a folder that `datasets` saved, Parquet files, or
    `hf:NAME` for a dataset of the Hugging Face Hub: see data.md."""
    format: Literal["auto", "text", "conversations", "preferences"] = "auto"
    """What a record holds: a document, a conversation, or a better and a worse answer; `auto`: as the first records
    say."""
    bad_lines: Literal["strict", "skip"] = "strict"
    """A line that holds no record ends the training with its file, line and column, or is skipped and counted."""
    max_bad_lines: CountOrZero | None = None
    """With `bad_lines: skip`, the most lines that are skipped; null: 1000, or 5% of the lines if that is more."""
    sequence_length: Count = 256
    """Tokens in one sample, or the most of them where samples are padded."""
    packing: Literal["none", "best_fit"] = "none"
    """`none`: text is one stream that is cut evenly, and a conversation has a row to itself, padded to the longest of
    its batch. `best_fit`: whole documents or conversations fill rows of `sequence_length`; none sees another, and
    positions restart at each."""
    buckets: bool = False
    """Batches of samples of alike length, the longest first, each in the fewest micro-batches whose predicted bytes fit
    the budget. Text then has a document a row, padded."""
    tokenizer: str = "auto"
    """`train` (a byte-level BPE on the source), `model` (the one in the folder of model.path), a tokenizer.json,
    or a folder that holds one; `auto`: `model` where weights are loaded, which know its tokens, else `train`."""
    vocab_size: Annotated[int, Field(ge=257)] = 6400
    """Vocabulary of a tokenizer that is trained: 256 bytes, the end of text, and the merges."""
    max_documents: Count | None = None
    """Read at most so many documents, from the start of the source; null: all."""
    validation_fraction: OpenShare = 0.01
    """Share of the samples held out for evaluation."""
    shuffle: bool = True
    """Shuffle documents before packing and samples in every epoch."""
    seed: CountOrZero = 0
    """Seed of the shuffling."""

    @model_validator(mode="after")
    def _rows_have_one_length_or_many(self) -> Self:
        if self.buckets and self.packing != "none":
            raise ValueError(
                f"buckets and packing {self.packing} are both set: packed rows are all of one length, remove one"
            )
        return self


class GrpoConfig(Section):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300), for `training.objective: grpo`."""

    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions of each prompt, whose rewards are compared with each other. `training.batch_size` counts
    completions."""
    max_completion_tokens: Count = 128
    """Most tokens of a completion. A prompt may have those that `data.sequence_length` has beside them."""
    temperature: Positive = 1.0
    """The completions are drawn from the softmax of the logits divided by it, and learnt as drawn."""
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """A token's ratio of probabilities, now and when it was drawn, counts within 1 - this and 1 + this."""
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the divergence from the reference, which is the model before the first step: adapters switched off, or
    a second copy of the weights. 0: no reference."""
    iterations: Count = 1
    """Optimizer steps that learn from the same completions."""


class TrainingConfig(Section):
    """The training run."""

    objective: Literal["auto", "causal", "sft", "dpo", "grpo"] = "auto"
    """`causal` learns every token, `sft` those of the assistant's turns, `dpo` to prefer the better answer; `auto`: by
    the data, in this order for texts, conversations and preference pairs. `grpo` learns from the rewards of what the
    model itself writes after prompts."""
    reward: str | None = None
    """With `grpo`, the function `module:function` that is called with the lists `prompts`, `completions` and one for
    each further column of the data, by these names, and returns a number for each completion."""
    grpo: GrpoConfig | None = None
    """The settings of `grpo`, as a mapping; null: its defaults."""
    dpo_beta: Positive = 0.1
    """With `dpo`, the strength with which the model is held to the reference, which is the model before the first step
    (Rafailov et al. 2023)."""
    max_steps: Count = 100
    """Optimizer steps."""
    batch_size: Count = 8
    """Sequences in one optimizer step, all micro-batches together."""
    gradient_accumulation_steps: Count | Literal["auto"] = 1
    """Equal micro-batches of the batch; the plan may split further if it may use `micro_batch`. `auto`: the fewest that
    fit the budget, so the largest micro-batch; batch and schedule stay unchanged."""
    learning_rate: Positive = 1e-3
    """The highest learning rate, reached after the warm-up."""
    min_lr_ratio: Share = 0.1
    """The last learning rate, as a share of `learning_rate`."""
    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises from zero."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine decay, stable and then linear decay, or constant."""
    optimizer: Annotated[str, BeforeValidator(_as_optimizer), AfterValidator(_known_optimizer)] = "adamw"
    """adamw (on bf16 weights adamw_bf16_stochastic), adamw_fused, adamw8bit, adamw4bit, adamw_bf16,
    adamw_bf16_stochastic, flash_adamw, offloaded_adamw (all of its states on the host, or a share:
    `offloaded_adamw:0.5`), offloaded_adamw_fused, adam, muon, muon8bit, adafactor or sgd: see optimizers.md. Any other
    one by its class, `module:Class`, or `{class: module:Class, betas: [0.9, 0.99]}` with arguments; `lr` and
    `weight_decay` among them are the keys of this section."""
    step_in_backward: bool = False
    """Update each weight as soon as its gradient is computed, and free the gradient; needs `grad_clip: null` and no
    fp16."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay, on matrices."""
    betas: Annotated[tuple[OpenShare, OpenShare], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Positive = 1e-8
    """AdamW's term in the denominator."""
    grad_clip: Positive | None = 1.0
    """Largest norm of all gradients together; null: no clipping."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32, or autocast to bf16, or to fp16 with a gradient scaler. `fp32` is no autocast: bf16 weights compute in
    bf16."""
    seed: CountOrZero = 0
    """Seed of the initial weights and of dropout."""
    log_every: Count = 1
    """Steps between two lines of metrics."""
    evaluate_every: Count | None = None
    """Steps between two evaluations on the samples held out; null: one after the last step."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """`auto` uses CUDA where it is present; `cpu`; `cuda`; for estimate and plan, also a card such as `rtx4090`, or
    one with figures of your own: `rtx3080,memory=8GiB`."""
    num_threads: Count | None = None
    """Threads of the CPU's operators; null: PyTorch's own choice."""
    parallel: Literal["auto", "ddp", "fsdp2"] = "auto"
    """How processes that torchrun starts share the training: `ddp`, each has the whole model and its part of every
    batch; `fsdp2`, each has its part of weights, gradients and states too, and gathers a block's weights when it runs;
    `auto`: `ddp` under torchrun, else one process."""
    rank_timeout: Count = 600
    """Seconds that a process waits for the others before it takes one for lost. Longer than a checkpoint's save."""

    @model_validator(mode="before")
    @classmethod
    def _one_rate(cls, raw: Any) -> Any:
        """An optimizer's arguments that are keys of the section, as these keys: the schedule reads them there."""
        if not isinstance(raw, dict) or not isinstance(raw.get("optimizer"), str | dict):
            return raw
        try:
            named = parse_optimizer(_as_optimizer(raw["optimizer"]))
        except ValueError:  # the key's own check says so, with its name
            return raw
        own = {key: named.arguments[name] for name, key in _OF_OPTIMIZER.items() if name in named.arguments}
        for key, value in own.items():
            if raw.get(key, value) != value:
                raise ValueError(f"optimizer has {key} {value} and {key} is {raw[key]}: keep one of them")
        left = {name: value for name, value in named.arguments.items() if name not in _OF_OPTIMIZER}
        return {**raw, **own, "optimizer": optimizer_class(named.kind, left)} if own else raw

    @property
    def groups(self) -> GrpoConfig:
        """The settings of `grpo`, given or not."""
        return self.grpo or GrpoConfig()

    @model_validator(mode="after")
    def _rewards_are_for_grpo(self) -> Self:
        if self.objective != "grpo":
            given = next((key for key in ("reward", "grpo") if getattr(self, key) is not None), None)
            if given is not None:
                raise ValueError(f"{given} is for objective grpo, not {self.objective}: set that, or remove {given}")
            return self
        if self.reward is None:
            raise ValueError("objective grpo needs a reward: name a function as module:function")
        if "" in self.reward.partition(":"):
            raise ValueError(f"reward {self.reward!r} names no function: write module:function")
        if self.batch_size % self.groups.group_size:
            raise ValueError(
                f"batch_size {self.batch_size} counts completions, and a group is {self.groups.group_size} of them "
                "(grpo.group_size): make it a multiple"
            )
        return self

    @model_validator(mode="after")
    def _steps_go_together(self) -> Self:
        if self.gradient_accumulation_steps != "auto" and self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not split in {self.gradient_accumulation_steps} equal "
                "micro-batches: make it a multiple of gradient_accumulation_steps"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} are more than max_steps {self.max_steps}: lower them")
        return self

    @model_validator(mode="after")
    def _gradients_are_there_to_be_looked_at(self) -> Self:
        if self.step_in_backward and self.grad_clip is not None:
            raise ValueError(STEP_IN_BACKWARD_AND_CLIPPING.refusal(other=f"grad_clip {self.grad_clip:g}"))
        if self.step_in_backward and self.precision == "fp16":
            raise ValueError(STEP_IN_BACKWARD_AND_SCALER.refusal())
        return self


class RecomputeConfig(Section):
    """Recompute set by hand instead of planned."""

    blocks: str | None = None
    """Glob over module paths, for example `layers.*` or `layers.*.mlp`; null: the blocks that tightfit finds."""
    segments: Count | None = None
    """Join the blocks to so many segments; null: every block is one."""
    use_reentrant: bool = False
    """Use PyTorch's older, reentrant checkpoint; it loses gradients of tensors that a block leaves on modules."""


class MemoryConfig(Section):
    """The memory budget and the means to meet it."""

    budget: Annotated[int | str | None, AfterValidator(_readable_budget)] = None
    """Peak memory of a step: bytes, `22GiB`, `24GB`, `80%` (of the device) or `0.5x` (of the plain peak); null: train
    without a plan."""
    levers: LeverNames = Field(
        default="rounding",
        description="Levers that the plan may use: `exact` or null (bit-equal only), `rounding` (also equal to "
        f"rounding), or a list of names: {_lever_names(on_request=False)}, and, only if you name them, "
        f"{_lever_names(on_request=True)}. A list may begin with a class: `[rounding, offload]`. Where recompute is "
        "allowed, a plan also uses capture if `max_steps` repays the recording.",
    )
    offload_folder: str | None = None
    """Folder of the unlinked file to which the lever `offload` moves a CPU's activations, and of the one that streamed
    weights are in: on a CPU, and on CUDA where `host_budget` has no room for them in memory; null: the system's folder
    for temporary files (`TMPDIR`; `/var/tmp` where that is in memory)."""
    offload_budget: Annotated[int | str | None, AfterValidator(_readable_size)] = None
    """Most bytes offloaded at once: bytes, `4GiB`, `4GB`; null: half of the folder's free space, or on CUDA half of the
    host's free memory, which holds the activations there."""
    host_budget: Annotated[int | str | None, AfterValidator(_readable_size)] = None
    """Most of the host's memory that the training may take, the process included: bytes, `32GiB`. The plan keeps to it
    (on a CPU a step has what the process leaves), freed memory returns to the system at once, which costs some time,
    and a line says if the process takes more. null: no limit."""
    allocator: Annotated[str | None, AfterValidator(_known_allocator)] = None
    """Settings of CUDA's allocator, made before CUDA starts: `expandable_segments` (less fragmentation), or
    `key:value` with commas between as in `PYTORCH_ALLOC_CONF`; null: the environment's setting. No effect on a CPU."""
    recompute: RecomputeConfig | None = None
    """Recompute set by hand, as a mapping; null: the plan decides."""
    compile_blocks: bool = False
    """Compile each kind of repeated block once, when it first runs: exact to rounding, without budget and recompute.
    On CUDA the peak is predicted as if nothing were compiled."""
    verify: bool = False
    """Before training, verify that the plan changes no gradient."""
    recover: bool = True
    """If a step runs out of memory, undo it and run it again on the same samples and random numbers with a tighter
    plan. Batch and schedule stay unchanged. false: the training ends with the error."""
    max_slowdown: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 0.5
    """Largest measured slowdown of the planned step against the plain one: 0.5 is 50% more time. Beyond it, a looser
    plan takes over if it fits the budget, computes the same bits and is measured faster; null: off."""

    @model_validator(mode="after")
    def _one_hand_on_recompute(self) -> Self:
        if self.budget is not None and self.recompute is not None:
            raise ValueError(BUDGET_AND_RECOMPUTE.refusal())
        if self.compile_blocks and self.budget is not None:
            raise ValueError(BUDGET_AND_COMPILED_BLOCKS.refusal())
        if self.compile_blocks and self.recompute is not None:
            raise ValueError(RECOMPUTE_AND_COMPILED_BLOCKS.refusal())
        return self


class OutputConfig(Section):
    """The run's results."""

    folder: str = "runs/run"
    """The run's folder, relative to the working folder."""
    overwrite: bool = False
    """Replace the files of an earlier run in the folder."""
    track: Annotated[tuple[Literal["tensorboard", "trackio", "wandb"], ...], BeforeValidator(_as_tuple)] = ()
    """Trackers that receive the figures of metrics.jsonl too: a list of `tensorboard` (event files in the run's
    folder), `trackio` and `wandb` (offline in the run's folder where there is no key). None of them needs a network."""


class CheckpointConfig(Section):
    """The state that a training leaves in `output.folder`/checkpoints, from which `tightfit train --resume` goes on."""

    every_steps: Count | None = None
    """Optimizer steps between two checkpoints; the last step has one too. null: one is written only when a signal ends
    the training, and a finished run cannot go on to more steps."""
    keep_last: Count = 2
    """Checkpoints that are kept, the newest ones."""
    keep_best: CountOrZero = 0
    """Checkpoints that are kept beside them: those of the lowest held-out loss, or of the lowest training loss where
    nothing is held out. Above 0, the held-out loss is computed for each checkpoint."""
    in_background: bool = False
    """Copy the state and write it while the training goes on. A CPU's budget includes the copy."""


class DistilConfig(Section):
    """Distillation: what `tightfit distil` needs beside the other sections. `tightfit train` refuses the section."""

    teacher: str | None = None
    """The folder of a finished run of tightfit, a local Hugging Face folder, or the name of a model on the hub. null:
    only with a `store` that is complete."""
    teacher_dtype: Literal["fp32", "bf16", "int8", "nf4"] = "bf16"
    """Storage of the teacher's weights: all in fp32 or bf16, or those of linear layers, except the head, in 8 bits with
    a scale per row or in 4-bit NormalFloat, and the others in bf16."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "logits_mse"] = "forward_kl"
    """Divergence of teacher and student for each token: KL(teacher || student), KL(student || teacher), the generalised
    Jensen-Shannon divergence, or the mean squared difference of the logits."""
    beta: Share = 0.5
    """With `jsd`, the teacher's share of the mixture (Agarwal et al. 2024)."""
    temperature: Positive = 1.0
    """Both distributions are of logits divided by it; the divergence is multiplied by its square (Hinton et al.
    2015)."""
    hard_weight: Share = 0.0
    """Share of the cross-entropy of the data's own labels in the loss; the divergence has the rest."""
    hidden_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the mean squared error of the last hidden states, which is added. If the widths differ, a projection of
    the student's is trained with it and removed at the end."""
    store: str | None = None
    """A folder for the teacher's distributions: written first if it is not complete, then the teacher leaves memory.
    null: the teacher runs beside the student in each step."""
    store_method: Literal["sampled", "topk"] = "sampled"
    """What the store keeps of each distribution: `k` tokens drawn at random and weighted so that the loss is right on
    average (Anshumann et al. 2025, arXiv:2503.16870), or the `k` likeliest tokens and the mass of all others, which is
    biased."""
    k: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Tokens that the store keeps for each position, of 4 bytes each, or 5 if the vocabulary has more than 65536; null:
    20."""
    seed: CountOrZero = 0
    """Seed of the store's draws."""
    student_layers: InnerShare | None = None
    """Cut the student out of the teacher, without this share of its layers, those that matter least; `model` is then
    left out but for `dtype`. null: all layers stay."""
    student_ffn: InnerShare | None = None
    """The same, without this share of the channels of each MLP and of each expert."""
    student_heads: InnerShare | None = None
    """The same, without this share of each layer's key and value heads and their query heads; whole heads."""
    student_width: InnerShare | None = None
    """The same, without this share of the hidden channels."""
    student_by: Literal["activation", "norm"] = "activation"
    """How parts are ranked: by what flows through them on the first 32 training samples, or by their weights alone."""

    @model_validator(mode="after")
    def _store_serves_the_loss(self) -> Self:
        if self.store is None and (self.k is not None or self.store_method != "sampled"):
            key = "k" if self.k is not None else "store_method"
            raise ValueError(f"{key} is set, and store, which it is for, is not: give store a folder, or remove {key}")
        if self.store is not None and self.divergence != "forward_kl":
            raise ValueError(
                f"divergence {self.divergence} needs the teacher's whole distribution, and a store keeps parts of it: "
                "take forward_kl, or remove store"
            )
        if self.store is not None and self.hidden_weight:
            raise ValueError(
                "hidden_weight needs hidden states, which a store does not keep: set it to 0, or remove store"
            )
        cuts = ("student_layers", "student_ffn", "student_heads", "student_width")
        if self.teacher is None and (given := next((key for key in cuts if getattr(self, key) is not None), None)):
            raise ValueError(f"{given} cuts the student out of the teacher, which is not given: give teacher a folder")
        return self


def _model_kind(raw: Any) -> str:
    """`model:` is a pretrained model where it has a path, else the reference decoder."""
    pretrained = isinstance(raw, PretrainedModel) or (isinstance(raw, dict) and "path" in raw)
    return "pretrained" if pretrained else "decoder"


ModelConfig = Annotated[
    Annotated[DecoderConfig, Tag("decoder")] | Annotated[PretrainedModel, Tag("pretrained")],
    Discriminator(_model_kind),
]


class Config(Section):
    """The whole configuration."""

    model: ModelConfig = DecoderConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    memory: MemoryConfig = MemoryConfig()
    output: OutputConfig = OutputConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distil: DistilConfig | None = None

    @model_validator(mode="after")
    def _sequence_within_positions(self) -> Self:
        if isinstance(self.model, DecoderConfig) and self.data.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than model.max_position_embeddings "
                f"{self.model.max_position_embeddings}: lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _prompts_and_completions(self) -> Self:
        if self.training.objective != "grpo":
            return self
        data, most = self.data, self.training.groups.max_completion_tokens
        if most >= data.sequence_length:
            raise ValueError(
                f"training.grpo.max_completion_tokens {most} leave no token of data.sequence_length "
                f"{data.sequence_length} for a prompt: lower the one or raise the other"
            )
        of_texts = {"packing": data.packing != "none", "buckets": data.buckets, "bad_lines": data.bad_lines == "skip"}
        if (key := next((key for key, is_set in of_texts.items() if is_set), None)) is not None:
            raise ValueError(f"data.{key} is for texts, and training.objective grpo reads prompts: remove it")
        if self.training.evaluate_every is not None:
            raise ValueError(
                "training.evaluate_every is set, and training.objective grpo holds no prompts out: remove it"
            )
        return self

    @model_validator(mode="after")
    def _something_to_evaluate_on(self) -> Self:
        if self.training.evaluate_every is not None and not self.data.validation_fraction:
            raise ValueError(
                "training.evaluate_every is set, and data.validation_fraction 0 holds no samples out: raise the "
                "fraction, or remove training.evaluate_every"
            )
        return self

    @model_validator(mode="after")
    def _auto_has_a_budget(self) -> Self:
        if self.training.gradient_accumulation_steps == "auto" and self.memory.budget is None:
            raise ValueError(
                "training.gradient_accumulation_steps auto takes the largest micro-batch within memory.budget, which "
                "is not given: give it, or a number of micro-batches"
            )
        return self


def field_names(section: type) -> tuple[str, ...]:
    """The keys of a section, in the order in which they are documented."""
    return tuple(field.name for field in fields(section)) if is_dataclass(section) else tuple(section.model_fields)


# The keys of every section; `preset` names a table of the decoder's other keys and is gone once it is read.
SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("preset", *field_names(DecoderConfig), *field_names(PretrainedModel)),
    "data": field_names(DataConfig),
    "training": field_names(TrainingConfig),
    "memory": field_names(MemoryConfig),
    "output": field_names(OutputConfig),
    "checkpoint": field_names(CheckpointConfig),
    "distil": field_names(DistilConfig),
}
