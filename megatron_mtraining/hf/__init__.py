"""Sparse attention inside Hugging Face transformers: importing this package registers it there as ``mtraining``.

    from megatron_mtraining import MTrainingConfig, hf
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="mtraining")
    hf.configure(model, MTrainingConfig(target_recall=0.98))

Training and prefill are sparse, decoding is dense. The configuration is saved with the model, in ``config.json``.
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers must be installed. Run: pip install 'megatron-mtraining[hf]'") from error
if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"transformers must be of version 5, got {transformers.__version__}. Run: pip install 'megatron-mtraining[hf]'"
    )

from .attention import NAME, configure
from .observer import LayerMetrics, observe
from .positions import stretch_positions

__all__ = ["NAME", "LayerMetrics", "configure", "observe", "stretch_positions"]
