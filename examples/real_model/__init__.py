"""A real model trained on long documents with dense and with sparse attention; see README.md."""
