"""Programs that run under TensorFlow and under tpudist, and must give the same results.

`cases/` holds the programs, one file for each part of tf.distribute. Each is written once, for the
small adapter that `on_tensorflow.py` and `on_tpudist.py` implement. `recorded/` holds what
TensorFlow gives, so that `test_parity.py` compares without TensorFlow. Where tpudist is meant to
differ, the case has the result of tpudist; the reasons are in `differences.py`.

To record again, after adding a case, with the packages of the extra `[parity]`:

    python -m tests.parity.record

To see that the record is what TensorFlow gives, `pytest -m parity`.
"""
