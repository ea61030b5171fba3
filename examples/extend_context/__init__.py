"""A Hugging Face model to a longer context and back, with unchanged Megatron-LM training scripts in between.

Five commands share one YAML file: ``python -m examples.extend_context COMMAND --config extend.yaml``.
See docs/extend_context.md.
"""
