"""Keras 3 models trained by `fit` in the scope of a strategy, split over its replicas.

There is nothing to call: `with strategy.scope():` is enough; see docs/keras_fit.md. Only where
variables are to be split over axes inside a replica is there something to say: `set_layout_map`.
"""

from tpudist.keras.layout_map import set_layout_map

__all__ = ["set_layout_map"]
