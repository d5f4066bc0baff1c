"""Reference models in plain Flax NNX, without any code for distribution, and pretrained weights."""

from tpudist.models import lora
from tpudist.models.convnet import ConvNet, ConvNetConfig
from tpudist.models.decoder import KVCache, decode_step, generate, prefill
from tpudist.models.mlp import MLP
from tpudist.models.next_token import next_token_loss, next_token_nats
from tpudist.models.pretrained.hub_config import read_config
from tpudist.models.pretrained.loader import load_pretrained
from tpudist.models.pretrained.saver import save_pretrained
from tpudist.models.pretrained.tokenizer import load_tokenizer
from tpudist.models.quantization import quantize
from tpudist.models.transformer import Transformer, TransformerConfig

__all__ = [
    "MLP",
    "ConvNet",
    "ConvNetConfig",
    "KVCache",
    "Transformer",
    "TransformerConfig",
    "decode_step",
    "generate",
    "load_pretrained",
    "load_tokenizer",
    "lora",
    "next_token_loss",
    "next_token_nats",
    "prefill",
    "quantize",
    "read_config",
    "save_pretrained",
]
