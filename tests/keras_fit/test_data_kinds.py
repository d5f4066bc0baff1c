"""`fit` accepts every kind of data that Keras accepts, in batches that do not divide evenly.

The tests of TensorFlow and PyTorch data run only where these packages are installed.
"""

import numpy as np
import pytest

import keras_models as km
import tpudist

X, Y = km.IMAGES[:26], km.LABELS[:26]  # two batches of 13


@pytest.fixture(scope="module")
def wanted():
    return km.train(km.make(km.mlp), X, Y, 13, shuffle=False)


def check(data, wanted):
    model = km.make(km.mlp, tpudist.MirroredStrategy())
    km.assert_same(km.train(model, data, None, None, shuffle=False), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # its length is unknown
def test_fit_accepts_a_grain_dataset(wanted):
    import grain

    dataset = grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(13)
    check(dataset, wanted)


@pytest.mark.slow
def test_fit_accepts_a_tf_data_dataset(wanted):
    tf = pytest.importorskip("tensorflow", exc_type=ImportError)
    check(tf.data.Dataset.from_tensor_slices((X, Y)).batch(13), wanted)


def test_fit_accepts_a_torch_data_loader(wanted):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    arrays = torch.from_numpy(X), torch.from_numpy(Y)
    dataset = torch.utils.data.TensorDataset(*arrays)
    check(torch.utils.data.DataLoader(dataset, batch_size=13), wanted)


@pytest.mark.slow
def test_fit_accepts_jax_arrays(wanted):
    import jax.numpy as jnp

    model = km.make(km.mlp, tpudist.MirroredStrategy())
    km.assert_same(km.train(model, jnp.array(X), jnp.array(Y), 13, shuffle=False), wanted)


@pytest.mark.slow
def test_fit_accepts_sparse_arrays():
    sparse = pytest.importorskip("scipy.sparse")
    import keras

    x = np.where(X.reshape(26, -1) > 1, 1, 0).astype("float32")

    def build():
        model = keras.Sequential([keras.layers.Input((36,), sparse=True), keras.layers.Dense(5)])
        model.compile("sgd", km.cross_entropy())
        return model

    def train(where):
        return km.train(km.make(build, where), sparse.csr_matrix(x), Y, 13, shuffle=False)

    with pytest.warns(UserWarning, match="holds a sparse .*each of the 8"):
        found = train(tpudist.MirroredStrategy())
    km.assert_same(found, train(None))
