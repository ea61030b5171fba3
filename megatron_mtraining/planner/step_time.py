"""Seconds of a training step, in parts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .attention_clock import AttentionClock
from .clock import Prediction
from .model import ModelShape
from .plan import FULL, NONE, SELECTIVE, Plan
from .profile import Profile

LOSS_BYTES, FUSED_LOSS_BYTES = 52, 44
"""Bytes read and written for each logit, forward and backward. Counted from the kernels that
megatron.core.tensor_parallel.cross_entropy launches one by one (to float32 6, maximum 4, subtraction 8, exponential 8,
sum 4, division 8; backward: scale 8, to bfloat16 6), and from what torch 2.11 compiles of the fused one (maximum 10,
exponential 8, division 8; backward 18)."""

GRADIENT_SUM_BYTES = 12
"""Bytes for each parameter and microbatch: a bfloat16 gradient written and read, added to a float32 one."""

ADAM_BYTES = 4 + 3 * 8 + 2
"""Bytes for each parameter of a shard: its gradient, three float32 states read and written, the bfloat16 weight."""

CLEAR_BYTES = 8
"""Bytes for each parameter: its gradient zeroed, and read for the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step on the busiest pipeline stage."""

    products: float = 0.0
    """Time of linear layers and the output layer."""

    elementwise: float = 0.0
    """Time of norms, residuals, activation, rotation, the loss, sums of gradients: bytes over the memory's rate."""

    attention: float = 0.0
    """Time of attention with its ring, forward and backward, waiting included."""

    selection: float = 0.0
    host: float = 0.0
    """Time that hosts need to launch attention, beyond all that the GPU does in a layer meanwhile."""

    tensor_parallel: float = 0.0
    pipeline: float = 0.0
    """Idle time while the pipeline fills and empties, and sends between stages."""

    data_parallel: float = 0.0
    """Time of gradients reduced and parameters gathered, as far as nothing hides it."""

    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Time of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def step_time(model: ModelShape, plan: Plan, clock: AttentionClock) -> StepTime:
    """Return the step of one plan: ``micro_batches`` passes of the busiest stage, then the optimizer."""
    profile = clock.profile
    forward, backward = _layer(model, plan, clock)
    again = {NONE: dict.fromkeys(forward, 0.0), SELECTIVE: _mlp(model, plan, profile), FULL: forward}[plan.recompute]
    layers = model.num_layers // plan.pp
    busy = {name: layers * (forward[name] + backward[name] + again.get(name, 0.0)) for name in forward}
    busy["host"] = layers * _host_lag(
        clock.predict(plan),
        forward=sum(forward.values()),
        backward=sum(backward.values()) + sum(again.values()),
        attends_again=plan.recompute == FULL,
    )
    loss = _loss(model, plan, profile)
    parameters = max(model.stage_parameters(tp=plan.tp, pp=plan.pp, stage=stage) for stage in {0, plan.pp - 1})
    busy["products"] += loss["products"]
    busy["elementwise"] += loss["elementwise"] + _moved(GRADIENT_SUM_BYTES * parameters, profile)
    passes = plan.micro_batches
    once = sum(busy.values())
    hidden = 2 * plan.local_tokens * model.hidden_size / plan.tp
    sending = 2 * hidden * _seconds_per_byte(plan, profile, stride=plan.tp * plan.cp * plan.dp) if plan.pp > 1 else 0.0
    return StepTime(
        **{name: passes * seconds for name, seconds in busy.items()},
        pipeline=(plan.pp - 1) * once + (passes + plan.pp - 1) * sending,
        data_parallel=_data_parallel(parameters, plan, profile, layers=(forward, backward), num_layers=layers),
        optimizer=_optimizer(parameters, plan, profile),
    )


def _layer(model: ModelShape, plan: Plan, clock: AttentionClock) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of one layer's forward and backward for one microbatch.

    Products: 2 FLOPs for each weight and token forward, 4 backward. Elementwise: two norms and two residual sums read
    and write 10 h, SwiGLU 3 f, copies and rotation 4 q + 2 k elements of a token; the backward twice as much.
    """
    profile, tokens = clock.profile, plan.local_tokens
    products = 2 * model.layer_weights * tokens / plan.tp / (1e12 * profile.gemm_tflops)
    elements = 10 * model.hidden_size + model.ffn_input_size + model.ffn_hidden_size
    elements += 4 * model.query_size + 2 * model.kv_size
    elementwise = _moved(2 * elements * tokens / plan.tp, profile)
    # Sequence parallelism: two all-gathers and two reduce-scatters each way; the backward gathers two inputs again.
    exchange = _tensor_parallel_exchange(model, plan, profile)
    prediction = clock.predict(plan)
    forward = {
        "products": products,
        "elementwise": elementwise,
        "attention": 1e-3 * prediction.forward.gpu_ms,
        "selection": clock.selection_seconds(plan),
        "tensor_parallel": 4 * exchange,
    }
    backward = {
        "products": 2 * products,
        "elementwise": 2 * elementwise,
        "attention": 1e-3 * prediction.backward.gpu_ms,
        "selection": 0.0,
        "tensor_parallel": 6 * exchange,
    }
    return forward, backward


def _host_lag(prediction: Prediction, *, forward: float, backward: float, attends_again: bool) -> float:
    """Return seconds in which a layer's GPU waits for its host. Launches run ahead, so whole passes are compared.

    Args:
        prediction: of attention, whose launches are those that count.
        forward: seconds of the GPU.
        backward: the same, with what is computed again.
        attends_again: whether the backward launches the forward of attention too.
    """
    launching, launching_back = (1e-3 * each.host_ms for each in (prediction.forward, prediction.backward))
    if attends_again:
        launching_back += launching
    return max(launching - forward, 0.0) + max(launching_back - backward, 0.0)


def _mlp(model: ModelShape, plan: Plan, profile: Profile) -> dict[str, float]:
    """Return seconds of the forward of an MLP alone."""
    weights = model.hidden_size * (model.ffn_input_size + model.ffn_hidden_size)
    elements = 2 * model.hidden_size + model.ffn_input_size + model.ffn_hidden_size
    return {
        "products": 2 * weights * plan.local_tokens / plan.tp / (1e12 * profile.gemm_tflops),
        "elementwise": _moved(2 * elements * plan.local_tokens / plan.tp, profile),
        "tensor_parallel": 2 * _tensor_parallel_exchange(model, plan, profile),
    }


def _loss(model: ModelShape, plan: Plan, profile: Profile) -> dict[str, float]:
    """Return seconds of the output layer and the cross entropy, forward and backward, for one microbatch."""
    logits = plan.local_tokens * model.padded_vocab(plan.tp) / plan.tp
    per_logit = FUSED_LOSS_BYTES if plan.loss_fusion else LOSS_BYTES
    return {
        "products": 6 * logits * model.hidden_size / (1e12 * profile.gemm_tflops),
        "elementwise": _moved(per_logit * logits, profile),
    }


def _data_parallel(
    parameters: int,
    plan: Plan,
    profile: Profile,
    *,
    layers: tuple[dict[str, float], dict[str, float]],
    num_layers: int,
) -> float:
    """Return seconds to reduce float32 gradients and gather bfloat16 parameters over data- and context-parallel ranks.

    Where they travel while layers compute, one pass of the backward hides the former and one of the forward the latter.
    """
    ranks = plan.dp * plan.cp
    rate = (ranks - 1) / ranks * _seconds_per_byte(plan, profile, stride=plan.tp, ranks=ranks)
    # Without shards every rank keeps everything: gradients are all-reduced.
    reduce, gather = (4, 2) if plan.distributed_optimizer else (8, 0)
    hidden_behind = [num_layers * sum(part.values()) if plan.overlap else 0.0 for part in layers]
    forward, backward = hidden_behind
    return max(reduce * parameters * rate - backward, 0.0) + max(gather * parameters * rate - forward, 0.0)


def _optimizer(parameters: int, plan: Plan, profile: Profile) -> float:
    """Return seconds of Adam over a rank's shard; on the host float32 gradients go down, bfloat16 weights come up."""
    shard = parameters / plan.optimizer_shards
    clearing = _moved(CLEAR_BYTES * parameters, profile)
    if plan.offload:
        return clearing + shard * (6 / (1e9 * profile.host_gb_s) + 1 / (1e9 * profile.host_adam_gparams_s))
    return clearing + _moved(ADAM_BYTES * shard, profile)


def _tensor_parallel_exchange(model: ModelShape, plan: Plan, profile: Profile) -> float:
    """Return seconds of one all-gather or reduce-scatter of the hidden states over tensor-parallel ranks."""
    if plan.tp == 1:
        return 0.0
    num_bytes = 2 * plan.local_tokens * model.hidden_size * (plan.tp - 1) / plan.tp
    return num_bytes / (1e9 * profile.inner_gb_s) + 1e-6 * profile.inner_latency_us


def _seconds_per_byte(plan: Plan, profile: Profile, *, stride: int, ranks: int = 2) -> float:
    """Return seconds per byte of a collective over ``ranks`` ``stride`` GPUs apart: in a node, or as nodes send."""
    in_node = max(min(plan.node_size // stride, ranks), 1)
    if in_node >= ranks:
        return 1e-9 / profile.inner_gb_s
    return 1e-9 / min(profile.inner_gb_s, profile.outer_gb_s * in_node)


def _moved(num_bytes: float, profile: Profile) -> float:
    return num_bytes / (1e9 * profile.memory_gb_s)
