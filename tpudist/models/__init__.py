"""The models that `scripts/train.py` trains: ordinary Flax NNX, which knows no strategy."""

from tpudist.models.convnet import ConvNet, ConvNetConfig
from tpudist.models.mlp import MLP
from tpudist.models.next_token import next_token_loss, next_token_nats
from tpudist.models.transformer import Transformer, TransformerConfig

__all__ = [
    "MLP",
    "ConvNet",
    "ConvNetConfig",
    "Transformer",
    "TransformerConfig",
    "next_token_loss",
    "next_token_nats",
]
