"""Pretrained weights: folders of safetensors and `config.json`, read and written."""
