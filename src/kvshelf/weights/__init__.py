"""Fingerprints of a model's weights and of LoRA adapters."""
