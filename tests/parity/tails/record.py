"""Records what TensorFlow gives for every program: `cd tests && python -m parity.tails.record`.

Each program has a process of its own for each number of replicas. PARITY_PYTHON names an
interpreter that has TensorFlow, if this one has not. Names of programs record only those.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
from typing import Any

from .. import record, rules
from . import runs

# oneDNN gives a convolution of no rows as many channels as its argument has.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
RECORDED = rules.RECORDED / "partial_batches.json"


def recorded() -> dict[str, dict[str, Any]]:
    """Returns the results of TensorFlow by program, then by `runs.key`."""
    return json.loads(RECORDED.read_text())["results"]


def on_tensorflow(num_replicas: int, names: list[str]) -> dict[str, Any]:
    """Returns the results of TensorFlow on a number of replicas, by program."""
    import tensorflow as tf

    [cpu] = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * num_replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    # Not by collective operations: where there are fewer cores than replicas, some wait forever,
    # and after an error on one replica there are none any more.
    strategy = tf.distribute.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)], tf.distribute.ReductionToOneDevice()
    )

    def dataset(strategy, arrays, batch):
        made = tf.data.Dataset.from_tensor_slices(arrays).batch(batch)
        # Otherwise a partial batch is split in equal parts over the replicas.
        options = tf.data.Options()
        off = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = off
        return strategy.experimental_distribute_dataset(made.with_options(options))

    results = {
        name: runs.results(name, "tensorflow", strategy, dataset, num_replicas) for name in names
    }
    for by_key in results.values():
        for key, result in by_key.items():
            if message := result.pop("message", None):  # not recorded: it names files
                print(f"{key}: {message}", file=sys.stderr)
    return {"version": tf.__version__, "results": results}


def in_processes(names: list[str]) -> dict[str, Any]:
    """The version of TensorFlow, and what it gives on every number of replicas."""
    jobs = [
        (str(n), name)
        for name in names
        for n in sorted({n for n, _, _ in runs.SPLITS_OF.get(name, runs.SPLITS)})
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        given = list(pool.map(_in_process, jobs))
    [version] = {g["version"] for g in given}
    results: dict[str, Any] = {}
    for g in given:
        for name, by_key in g["results"].items():
            results.setdefault(name, {}).update(by_key)
    return {"version": version, "results": results}


def _in_process(job: tuple[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [record.PYTHON, "-m", "parity.tails.record", *job],
        cwd=rules.RECORDED.parent.parent,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{job} failed with {done.returncode}:\n{done.stderr[-4000:]}")
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def text(version: str, results: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each run."""
    entries = []
    for name, by_key in results.items():
        keys = [runs.key(*split) for split in runs.SPLITS_OF.get(name, runs.SPLITS)]
        lines = [f"      {json.dumps(k)}: {json.dumps(by_key[k])}" for k in keys]
        entries.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n    }")
    body = ",\n".join(entries)
    return f'{{\n  "tensorflow": "{version}",\n  "results": {{\n{body}\n  }}\n}}\n'


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0].isdigit():
        print(json.dumps(on_tensorflow(int(arguments[0]), arguments[1:])))
        return
    names = arguments or list(runs.PROGRAMS)
    found = in_processes(names)
    before = recorded() if arguments and RECORDED.exists() else {}
    results = before | found["results"]
    results = {name: results[name] for name in runs.PROGRAMS if name in results}
    RECORDED.write_text(text(found["version"], results))


if __name__ == "__main__":
    main()
