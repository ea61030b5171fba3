"""Seconds of a training step, in parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .attention_clock import AttentionClock
from .clock import Prediction
from .model import ModelShape
from .plan import FULL, NONE, SELECTIVE, Plan
from .profile import Profile

LOSS_BYTES = 52
"""Bytes read and written for each logit by the kernels of megatron.core.tensor_parallel.cross_entropy: to float32 6,
maximum 4, subtraction 8, exponential 8, sum 4, division 8; backward: scale 8, to bfloat16 6."""

GRADIENT_SUM_BYTES = 12
"""Bytes for each parameter and microbatch: a bfloat16 gradient written and read, added to a float32 one."""

ADAM_BYTES, CLEAR_BYTES = 4 + 3 * 8 + 2, 8
"""Bytes for each parameter of a shard: its gradient, three float32 states read and written, the bfloat16 weight; and
for each parameter: its gradient zeroed, and read for the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step on the busiest pipeline stage."""

    products: float = 0.0  # linear layers and the output layer
    elementwise: float = 0.0  # norms, residuals, activation, rotation, loss, sums of gradients: bytes over the rate
    attention: float = 0.0  # with its ring, forward and backward, waiting included
    selection: float = 0.0
    host: float = 0.0  # launching attention, beyond all that the GPU does in a layer meanwhile
    tensor_parallel: float = 0.0
    pipeline: float = 0.0  # idle while the pipeline fills and empties, and sends between stages
    data_parallel: float = 0.0  # gradients reduced and parameters gathered, as far as nothing hides it
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Time of all parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the parts by name."""
        return asdict(self)


def step_time(model: ModelShape, plan: Plan, clock: AttentionClock) -> StepTime:
    """Return the step of one plan: ``micro_batches`` passes of the busiest stage, then the optimizer."""
    profile = clock.profile
    forward, backward = _layer(model, plan, clock)
    again = {NONE: dict.fromkeys(forward, 0.0), SELECTIVE: _mlp(model, plan, profile), FULL: forward}[plan.recompute]
    layers = model.num_layers // plan.pp
    busy = {name: layers * (forward[name] + backward[name] + again.get(name, 0.0)) for name in forward}
    busy_back = sum(backward.values()) + sum(again.values())
    busy["host"] = layers * _host_lag(clock.predict(plan), plan, sum(forward.values()), busy_back)
    parameters = max(model.stage_parameters(tp=plan.tp, pp=plan.pp, stage=stage) for stage in {0, plan.pp - 1})
    logits = plan.local_tokens * model.padded_vocab(plan.tp) / plan.tp
    busy["products"] += 6 * logits * model.hidden_size / (1e12 * profile.gemm_tflops)
    busy["elementwise"] += _moved(LOSS_BYTES * logits, profile) + _moved(GRADIENT_SUM_BYTES * parameters, profile)
    passes, once = plan.micro_batches, sum(busy.values())
    hidden = 2 * plan.local_tokens * model.hidden_size / plan.tp
    sending = 2 * hidden * _seconds_per_byte(plan, profile, stride=plan.tp * plan.cp * plan.dp) if plan.pp > 1 else 0.0
    # One pass of the layers' backward hides the reduction of gradients, one of their forward the gather of parameters.
    hidden_behind = [layers * sum(part.values()) if plan.overlap else 0.0 for part in (forward, backward)]
    return StepTime(
        **{name: passes * seconds for name, seconds in busy.items()},
        pipeline=(plan.pp - 1) * once + (passes + plan.pp - 1) * sending,
        data_parallel=_data_parallel(parameters, plan, profile, *hidden_behind),
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
    moved = _moved(2 * elements * tokens / plan.tp, profile)
    # Sequence parallelism: two all-gathers and two reduce-scatters each way; the backward gathers two inputs again.
    exchange = _tensor_parallel_exchange(model, plan, profile)
    predicted = clock.predict(plan)
    names = ("products", "elementwise", "attention", "selection", "tensor_parallel")
    forward = (products, moved, 1e-3 * predicted.forward.gpu_ms, clock.selection_seconds(plan), 4 * exchange)
    backward = (2 * products, 2 * moved, 1e-3 * predicted.backward.gpu_ms, 0.0, 6 * exchange)
    return dict(zip(names, forward, strict=True)), dict(zip(names, backward, strict=True))


def _host_lag(predicted: Prediction, plan: Plan, forward: float, backward: float) -> float:
    """Return seconds in which a layer's GPU, busy for ``forward`` and ``backward`` seconds, waits for its host.

    Launches run ahead, so whole passes are compared; full recomputation launches a forward in the backward.
    """
    launches, launches_back = (1e-3 * each.host_ms for each in (predicted.forward, predicted.backward))
    launches_back += launches if plan.recompute == FULL else 0.0
    return max(launches - forward, 0.0) + max(launches_back - backward, 0.0)


def _mlp(model: ModelShape, plan: Plan, profile: Profile) -> dict[str, float]:
    """Return seconds of the forward of an MLP alone."""
    weights = model.hidden_size * (model.ffn_input_size + model.ffn_hidden_size)
    elements = 2 * model.hidden_size + model.ffn_input_size + model.ffn_hidden_size
    return {
        "products": 2 * weights * plan.local_tokens / plan.tp / (1e12 * profile.gemm_tflops),
        "elementwise": _moved(2 * elements * plan.local_tokens / plan.tp, profile),
        "tensor_parallel": 2 * _tensor_parallel_exchange(model, plan, profile),
    }


def _data_parallel(parameters: int, plan: Plan, profile: Profile, forward: float, backward: float) -> float:
    """Return seconds, less those hidden, to reduce float32 gradients and gather bfloat16 parameters over all ranks."""
    ranks = plan.dp * plan.cp
    rate = (ranks - 1) / ranks * _seconds_per_byte(plan, profile, stride=plan.tp, ranks=ranks)
    return max(4 * parameters * rate - backward, 0.0) + max(2 * parameters * rate - forward, 0.0)


def _optimizer(parameters: int, plan: Plan, profile: Profile) -> float:
    """Return seconds of Adam over a rank's shard; on the host float32 gradients go down, bfloat16 weights come up."""
    shard = parameters / plan.optimizer_shards
    clearing = _moved(CLEAR_BYTES * parameters, profile)
    if plan.offload:
        return clearing + shard * (6 / (1e9 * profile.host_gb_s) + 1 / (1e9 * profile.host_adam_gparams_s))
    return clearing + _moved(ADAM_BYTES * shard, profile)


def _tensor_parallel_exchange(model: ModelShape, plan: Plan, profile: Profile) -> float:
    """Return seconds of one all-gather or reduce-scatter of the hidden states over tensor-parallel ranks."""
    num_bytes = 2 * plan.local_tokens * model.hidden_size * (plan.tp - 1) / plan.tp
    return num_bytes / (1e9 * profile.inner_gb_s) + 1e-6 * profile.inner_latency_us if plan.tp > 1 else 0.0


def _seconds_per_byte(plan: Plan, profile: Profile, *, stride: int, ranks: int = 2) -> float:
    """Return seconds per byte of a collective over ``ranks`` ``stride`` GPUs apart: in a node, or as nodes send."""
    in_node = max(min(plan.node_size // stride, ranks), 1)
    rate = profile.inner_gb_s if in_node >= ranks else min(profile.inner_gb_s, profile.outer_gb_s * in_node)
    return 1e-9 / rate


def _moved(num_bytes: float, profile: Profile) -> float:
    return num_bytes / (1e9 * profile.memory_gb_s)
