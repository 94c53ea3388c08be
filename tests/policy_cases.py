"""The policies that the suite samples under with any model: all registered ones except the learned ones and
those that need more than a model."""

from sparse_rl.attention.families import HYBRID
from sparse_rl.methods.config import CONFIGS, accepted_parameters

# learned policies need a model with scorers: tests/rollout/test_learned_decoding.py, test_gated.py
LEARNED = ["kvpop", "dms"]
PAGED = ["clustered", "layered"]  # policies with pages are tested in tests/methods/pages
PRESSED = ["press"]  # needs kvpress: tests/methods/press
CALIBRATED = ["triattention"]  # needs a model with centres (tiny.centred): tests/policies/test_policy_triattention.py
# families to whose tiny models they do not apply: RoPE is partial or interleaved, absent in a layer, or scales queries;
# or queries differ by the state of a layer
UNCALIBRATED = ["phi3", "glm4", "glm4_moe", "smollm3", "ministral3", *HYBRID]
SAMPLED = [name for name in CONFIGS if name not in (*LEARNED, *PAGED, *PRESSED, *CALIBRATED)]
ON_VLLM = [name for name in SAMPLED if name != "lined"]  # the number of entries of this policy keeps growing
BOUNDED = [name for name in SAMPLED if "budget" in accepted_parameters(name)]
EVICTING = [name for name in SAMPLED if name != "full"]
