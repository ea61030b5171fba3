"""Evaluation of models under dense and sparse prefill: needles, copied texts, perplexity and InfiniteBench."""
