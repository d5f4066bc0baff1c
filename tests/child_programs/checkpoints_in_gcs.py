"""Saves to Google Cloud Storage and restores from it; the server is an emulator on loopback.

The environment names the server before any library looks for it.
"""

import json
import os
import socket
import sys
import warnings

from gcp_storage_emulator.server import create_server

with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
URL = f"http://127.0.0.1:{port}"
os.environ.update(
    STORAGE_EMULATOR_HOST=URL,  # of gcsfs
    GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",  # which asks another service by gRPC
    FSSPEC_GCS='{"token": "anon"}',
    FSSPEC_GS='{"token": "anon"}',
    TENSORSTORE_GCS_HTTP_URL=URL,
    GOOGLE_AUTH_TOKEN_FOR_TESTING="test",
)
server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bkt")
server.start()

import gcsfs  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from tpudist.checkpoint import Checkpoint, CheckpointManager  # noqa: E402
from tpudist.input import RemoteOptions, from_files  # noqa: E402

report: dict[str, object] = {}
files = gcsfs.core.GCSFileSystem(token="anon", use_listings_cache=False)


def checkpoint(scale):
    return Checkpoint(w=scale * jnp.arange(8.0), step=scale)


def manager(scale):
    return CheckpointManager(checkpoint(scale), "gs://bkt/run", max_to_keep=2)


saving = manager(0)
for step in (1, 2, 3):
    saving.checkpoint.w = float(step) * jnp.arange(8.0)
    saving.save(step)
saving.close()
report["kept"] = list(saving.checkpoints)

# A save that was not committed is not a step.
files.copy("bkt/run/3/tpudist/metadata", "bkt/run/4/tpudist/metadata")
restoring = manager(0)
restoring.restore_or_initialize()
report["restored"] = np.asarray(restoring.checkpoint.w).tolist()
restoring.close()

# A flipped bit is found, and the step before is used.
(name,) = [x for x in files.find("bkt/run/3/state") if x.endswith("_METADATA")]
data = bytearray(files.cat(name))
data[5] ^= 1
files.pipe(name, bytes(data))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    restoring = manager(0)
    restoring.restore_or_initialize()
report["after damage"] = np.asarray(restoring.checkpoint.w).tolist()
report["warned"] = any("damaged" in str(x.message) for x in caught)
restoring.close()

# A path that is written twice has the later values.
for scale in (1, 2):
    checkpoint(scale).write("gs://bkt/one")
target = checkpoint(0)
target.read("gs://bkt/one")
report["read"] = np.asarray(target.w).tolist()

# Files of the same server.
files.pipe("bkt/a.txt", b"1\n2\n3\n")
remote = RemoteOptions(storage_options={"token": "anon"}, index_folder="gs://bkt/index")
dataset = from_files("gs://bkt/*.txt", parse=lambda x: {"id": np.int32(x)}, remote=remote)
report["ids"] = [x["id"].tolist() for x in dataset.batch(2)]
report["indexes"] = len(files.ls("bkt/index"))

print("REPORT " + json.dumps(report))
sys.stdout.flush()
server.stop()
