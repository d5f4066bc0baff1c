"""Keras 3 models trained by `fit` in the scope of a strategy, split over its replicas.

There is nothing to call: `with strategy.scope():` is enough; see docs/keras_fit.md. Only where
variables are to be split over axes inside a replica is there something to say: `set_layout_map`;
and `ModelState` is what a checkpoint saves of a model. In loops of one's own `value_and_grad`
stands where TensorFlow has `tf.GradientTape`.
"""

from tpudist.keras.held_variables import value_and_grad
from tpudist.keras.layout_map import set_layout_map
from tpudist.keras.model_state import ModelState

__all__ = ["ModelState", "set_layout_map", "value_and_grad"]
