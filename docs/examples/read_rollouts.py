"""Read what `sparse-rl rollout` wrote, with numpy alone: python docs/examples/read_rollouts.py FOLDER"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

DTYPES = {"I16": "int16", "I32": "int32", "I64": "int64", "F32": "float32", "F64": "float64"}


def read_tensors(file):
    """Return name -> array of a file of traces (safetensors). Raises ValueError for a damaged or unknown file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    if (metadata.get("format"), metadata.get("format_version")) != ("sparse_rl.trace", "3"):
        raise ValueError(f"{file} is not a file of traces of version 3")
    tensors = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        values = np.frombuffer(data[start + begin : start + end], np.dtype(DTYPES[about["dtype"]]).newbyteorder("<"))
        tensors[name] = values.reshape(about["shape"])
    kinds = [[name, f"torch.{DTYPES[header[name]['dtype']]}", header[name]["shape"]] for name in sorted(header)]
    expected = metadata.pop("sha256")
    digest = hashlib.sha256(json.dumps([dict(sorted(metadata.items())), kinds]).encode())
    for name in sorted(header):
        digest.update(tensors[name].tobytes())
    if digest.hexdigest() != expected:
        raise ValueError(f"{file} is damaged")
    return tensors


def read_rollouts(folder):
    """Yield the rollouts: prompt_ids, completion_ids, logprobs, ... and evict_at, int32 [layers, kv heads, tokens]."""
    folder = Path(folder)
    with (folder / "completions.jsonl").open() as lines:
        for file in sorted(folder.glob("traces-*.safetensors")):
            tensors = read_tensors(file)
            further = {name for name in tensors if not name.endswith(".lengths")} - {"evict_at", "windowed"}
            if further:  # evictions alone would be another attention
                raise ValueError(f"{file} has sections that this example cannot replay: {sorted(further)}")
            ends = tensors["evict_at.lengths"].cumsum()[:-1]
            for evict_at in np.split(tensors["evict_at"], ends, axis=2):
                rollout = json.loads(next(lines))
                if evict_at.shape[2] != len(rollout["prompt_ids"]) + len(rollout["completion_ids"]):
                    raise ValueError(f"{file} does not belong to {lines.name}")
                yield {**rollout, "evict_at": evict_at}


if __name__ == "__main__":
    for rollout in read_rollouts(sys.argv[1]):
        layers, heads, tokens = rollout["evict_at"].shape
        held = (rollout["evict_at"] >= tokens - 1).sum() / layers / heads
        print(f"{tokens} tokens, of which a kv head holds {held:.1f} at the end")
