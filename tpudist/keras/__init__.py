"""Keras 3 models in the scope of a strategy: `fit` splits each batch over the replicas.

`with strategy.scope():` is enough; see docs/keras_fit.md. The names below are for special cases:
`set_layout_map` splits variables over axes inside a replica, `ModelState` is the state of a model
in a checkpoint, and `value_and_grad` replaces `tf.GradientTape` in your own training loops.
"""

from tpudist.keras.layout_map import set_layout_map
from tpudist.keras.model_state import ModelState
from tpudist.keras.variable_gradients import value_and_grad

__all__ = ["ModelState", "set_layout_map", "value_and_grad"]
